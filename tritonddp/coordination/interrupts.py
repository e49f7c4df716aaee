"""Ctrl-C waits while this rank does what it must not do by halves."""

from __future__ import annotations

from signal import SIGINT
from types import FrameType

from tritonddp._torch import set_signal_handler, signal_handler


class Uninterrupted:
    """Context: a KeyboardInterrupt that comes inside is raised at its end; a second one at once.

    Python handles signals between any two instructions of the main thread, so also between a
    collective that has been issued and the note that it has: the rank would issue it again, and be
    out of step with the others for good. On other threads, where no signal is handled, and inside
    another one this does nothing. Takes 1 us.
    """

    __slots__ = ("_came", "_former")

    def __enter__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        former = self._former = signal_handler(SIGINT)
        # What cannot be called is the system's: it ends the process or does nothing.
        if callable(former) and not isinstance(getattr(former, "__self__", None), Uninterrupted):
            try:
                set_signal_handler(SIGINT, self._note)
                return
            except ValueError:  # on another thread than the main one
                pass
        self._former = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is None:
            self._came = number, frame
        elif self._former is not None:
            # It may come in __exit__, which what it raises ends.
            set_signal_handler(SIGINT, self._former)
            self._former(number, frame)

    def __exit__(self, *_: object) -> None:
        if self._former is None:
            return
        if signal_handler(SIGINT) == self._note:  # a hook may have set another one, to stay
            set_signal_handler(SIGINT, self._former)
        if self._came is not None:
            self._former(*self._came)
