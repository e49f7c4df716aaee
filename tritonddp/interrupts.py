"""Ctrl-C waits while this rank does what it must not do by halves."""

from __future__ import annotations

import threading
from signal import SIGINT
from types import FrameType

from tritonddp._compat import set_signal_handler, signal_handler


class Uninterrupted:
    """Context: a KeyboardInterrupt that comes inside is raised at its end; a second one at once.

    Python handles signals between any two instructions of the main thread, so also between a
    collective that has been issued and the note that it has: the rank would issue it again, and be
    out of step with the others for good. On other threads, where no signal is handled, this does
    nothing. Takes 3 us.
    """

    __slots__ = ("_came", "_former")

    def __enter__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        former = signal_handler(SIGINT)
        # Another one is the system's, which ends the process or does nothing.
        self._former = former if callable(former) and _on_main_thread() else None
        if self._former is not None:
            set_signal_handler(SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None and self._former is not None:
            self._former(number, frame)
        self._came = number, frame

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            set_signal_handler(SIGINT, self._former)
            if self._came is not None:
                self._former(*self._came)


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
