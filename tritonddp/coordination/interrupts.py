"""Delay Ctrl-C while this rank does something that must not be interrupted half-way."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
from signal import SIGINT
from types import FrameType

# Those of the module signal take ten times as long, since they convert handlers to enums.
signal_handler = _signal.getsignal
set_signal_handler = _signal.signal


class Uninterrupted:
    """Context: a KeyboardInterrupt inside is raised at the end; a second one is raised at once.

    For what is done for another process group than the one that the rank uses, and waits in: that
    does not hear of the interrupt (see ``Group.uninterrupted``). Does nothing on other threads,
    which handle no signals, and inside another such context. Takes 1 us.
    """

    __slots__ = ("_former", "_pending")

    def __enter__(self) -> None:
        self._pending: tuple[int, FrameType | None] | None = None
        former = self._former = signal_handler(SIGINT)
        # A handler that is not callable is the system's: it ends the process or ignores the signal.
        if callable(former) and not isinstance(getattr(former, "__self__", None), Uninterrupted):
            try:
                set_signal_handler(SIGINT, self._note)
                return
            except ValueError:  # on another thread than the main one
                pass
        self._former = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending is None:
            self._pending = number, frame
        elif self._former is not None:
            # Restore the handler here: the exception may arise in __exit__ and end that early.
            set_signal_handler(SIGINT, self._former)
            self._former(number, frame)

    def __exit__(self, *_: object) -> None:
        if self._former is None:
            return
        if signal_handler(SIGINT) == self._note:  # else a hook has set its own: keep that
            set_signal_handler(SIGINT, self._former)
        if self._pending is not None:
            self._former(*self._pending)
