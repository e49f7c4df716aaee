"""The long path: each step as if nothing had been prepared in the steps before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from tritonddp.comm.run import ReductionRun
from tritonddp.reducer.readiness import ReadyTracker
from tritonddp.reducer.reducer import Reducer


@contextlib.contextmanager
def nothing_prepared() -> Iterator[None]:
    """Context: no order of gradients is usual, no trailer is as it was."""
    begin, announce = ReadyTracker.begin, Reducer.announce

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        self.reached = []  # what is expected is found out anew
        begin(self, *args, **kwargs)
        self._usual[:] = [None] * len(self._usual)

    def announced(self: Reducer, run: ReductionRun) -> None:
        self.agreement.key = None
        for bucket in run.buckets:
            bucket.last_trailer = None
            if bucket.flat is not None:
                bucket.flat.encoded = bucket.flat.batched = None
        announce(self, run)

    with (
        patch.object(ReadyTracker, "begin", begun),
        patch.object(Reducer, "announce", announced),
        patch.object(Reducer, "_exchanges_nothing", lambda self: False),
    ):
        yield
