"""Where in the program ``backward()`` is called: in the same place on all ranks, or wrong.

A module that is replicated in place reduces every backward through its parameters. So if one rank
alone makes a backward, for a saliency map say, the others would take it for their next step, and no
number of forwards or backwards tells them apart: each rank has made as many as the others, until
the program ends. What differs is the place that calls ``backward()``: the two innermost lines of
the user's program, as one of them may be in a helper that trains as well.
"""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import PurePath
from sys import _current_frames, _getframe
from types import FrameType

# The function of torch that calls the engine. Below it in the stack are the hooks of a backward, if
# they run on the thread of the caller.
ENGINE = "_engine_run_backward"
# In the path of a file that belongs to an installed library, whose lines all programs share.
INSTALLED = "-packages"
# So many lines are a place, and twice as many numbers its key: see CallSites.
_LINES = 2
KEY = 2 * _LINES


class CallSite:
    """A place that calls ``backward()``.

    Attributes:
        name: functions and lines, for errors.
        hash: of the lines, 3 bytes. (Not of the functions: torch.compile makes others of them,
            perhaps on one rank alone.)
    """

    def __init__(self, frames: list[FrameType]) -> None:
        self._codes = [frame.f_code for frame in frames]  # keep the key of CallSites its own
        # (The name with the class is of Python 3.11.)
        functions = [getattr(code, "co_qualname", code.co_name) for code in self._codes]
        lines = [f"{PurePath(each.f_code.co_filename).name}:{each.f_lineno}" for each in frames]
        named = [f"{name} ({line})" for name, line in zip(functions, lines, strict=True)]
        self.name = f"called in {', in '.join(named)}" if named else "called on another thread"
        self.hash = sha256(" ".join(lines).encode()).digest()[:3]


class CallSites(dict[tuple[int, ...], CallSite]):
    """The places that were found so far.

    By the ids of their code and the places in it. On a GPU hooks run on threads of the engine: then
    the main thread is looked at; if that runs no backward, nothing is known, on no rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._main = threading.main_thread().ident or 0

    def find(self) -> CallSite:
        """The place that has called the backward that runs. To be called from a hook."""
        frames = _callers(_getframe(1)) or _callers(_current_frames().get(self._main))
        key = tuple(number for each in frames for number in (id(each.f_code), each.f_lasti))
        if key not in self:
            self[key] = CallSite(frames)
        return self[key]


def _callers(frame: FrameType | None) -> list[FrameType]:
    """The innermost frames of the user's program that have called the engine, from ``frame``.

    Of a library other than torch, if there are no others.
    """
    found: list[FrameType] = []
    others: list[FrameType] = []
    while frame is not None and frame.f_code.co_name != ENGINE:
        frame = frame.f_back
    while frame is not None and len(found) < _LINES:
        if frame.f_globals.get("__name__", "")[:6] != "torch.":
            (others if INSTALLED in frame.f_code.co_filename else found).append(frame)
        frame = frame.f_back
    return found or others[:_LINES]
