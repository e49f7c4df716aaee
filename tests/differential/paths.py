"""The long path: each step as if nothing had been prepared in the steps before."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from tritonddp.comm.reduction import Reduction
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.graph.readiness import ReadyTracker


@contextlib.contextmanager
def nothing_prepared() -> Iterator[None]:
    """Context: no order of gradients is usual, no trailer is as it was."""
    begin, make_header = ReadyTracker.begin, Reduction._make_header

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        _set(self, _made_for=((), ()))  # what is expected is found out anew
        begin(self, *args, **kwargs)
        self._usual[:] = [None] * len(self._usual)

    def header_made(self: Reduction) -> None:
        _set(self.agreement, key=None, expected=b"")
        for bucket in self.buckets:
            if bucket.flat is not None:
                _set(bucket.flat, encoded=None, batched=None, last_flags=(b"", ()))
        make_header(self)

    with (
        patch.object(ReadyTracker, "begin", begun),
        patch.object(Reduction, "_make_header", header_made),
        patch.object(AutogradDriver, "exchanges_alone", True),
    ):
        yield


def _set(owner: Any, **values: Any) -> None:
    """Attributes that there are: another one would change nothing."""
    for name, value in values.items():
        assert hasattr(owner, name), f"{type(owner).__name__} has no attribute {name!r}"
        setattr(owner, name, value)
