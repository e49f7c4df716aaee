"""Actions and errors that are deferred to the next forward of this rank with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn


class Deferred(list[Callable[[], None]]):
    """Calls that the next forward makes, oldest first. Each call is removed before it runs."""

    def raise_later(self, error: RuntimeError) -> None:
        """Make the next forward raise this error, replacing an earlier one."""
        self[:] = [each for each in self if getattr(each, "func", None) is not raise_error]
        self.append(partial(raise_error, error))

    def run(self) -> None:
        """Run the calls."""
        while self:
            self.pop(0)()


def raise_error(error: Exception) -> NoReturn:
    """Raise this error; usable as a callback."""
    raise error
