"""What this rank has to do, or to raise, at its next forward with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn


class Deferred(list[Callable[[], None]]):
    """Calls that the next forward makes, oldest first. Each is dropped before it is made."""

    def raise_later(self, error: RuntimeError) -> None:
        """Have the next forward raise this error, in the place of an earlier one."""
        self[:] = [each for each in self if getattr(each, "func", None) is not raise_error]
        self.append(partial(raise_error, error))

    def run(self) -> None:
        """Make the calls."""
        while self:
            self.pop(0)()


def raise_error(error: Exception) -> NoReturn:
    """Raise this error: for a callback."""
    raise error
