"""Verification that all ranks call ``backward()`` in the same place of the program.

A module that is replicated in place reduces every backward through its parameters. If only one rank
runs a backward, for example for a saliency map, the other ranks would take it for their next step.
Counting forwards or backwards does not reveal this, because all ranks have run the same number
until the program ends. What differs is the call site of ``backward()``: the innermost line of the
user's program. Its callers are not compared, because rank 0 may time or log its steps.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from hashlib import sha256
from pathlib import PurePath
from sys import _current_frames, _getframe
from types import FrameType
from typing import Any

from tritonddp.coordination.agreement import HeaderField, SchemaMismatch, differ
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward, SyncState
from tritonddp.reducer.graph.participation import ENGINE

# Part of the path of an installed library, whose lines all programs share.
INSTALLED = "-packages"
# Frames of a mode or a tensor subclass between the program and ``backward()``.
MODE = "__torch_function__"


class CallSite:
    """A line that calls ``backward()``.

    Attributes:
        name: the function and the line, for errors.
        hash: 3-byte hash of the line. The function is excluded, because torch.compile replaces it,
            possibly on one rank only.
    """

    def __init__(self, frame: FrameType | None) -> None:
        line, self.name = "", "called on another thread"
        if frame is not None:
            code = self._code = frame.f_code  # keeps the key in CallSites unique
            line = f"{PurePath(code.co_filename).name}:{frame.f_lineno}"
            # co_qualname, which includes the class, exists since Python 3.11.
            self.name = f"called in {getattr(code, 'co_qualname', code.co_name)} ({line})"
        self.hash = sha256(line.encode()).digest()[:3]


class _CallSiteField(HeaderField):
    """The :class:`CallSite` of a backward; ``None`` if no call site counts."""

    size = 3

    def encode(self, value: CallSite | None) -> bytes:
        return bytes(3) if value is None else value.hash

    def check(self, values: Mapping[int, Any], whole: Mapping[int, Any], mine: Any) -> None:
        if differ(whole):
            raise SchemaMismatch(
                options={} if mine is None else {"backward()": mine.name},
                advice="The module is replicated in place: all ranks must call backward() on the "
                "same line of the program. Run backwards of a single rank inside no_sync(), or use "
                "torch.autograd.grad: both stay local.",
            )


CALL_SITE = _CallSiteField()


class CallSites(Extension):
    """Tells the other ranks where each reduced backward is called.

    On a GPU, hooks run on threads of the engine, so the main thread is inspected. If that thread
    runs no backward, the call site is unknown, on all ranks.
    """

    def __init__(self, sync: SyncState) -> None:
        self._sync = sync
        # The lines found so far, by the id of their code object and the offset in it.
        self._found: dict[tuple[int, int], CallSite] = {}
        self._unknown = CallSite(None)
        self._main = threading.main_thread().ident or 0

    def on_begin(self, backward: Backward) -> None:
        """Find the line. Inside ``join()``, skip this: ranks without inputs call no backward."""
        if backward.reduction is not None and self._sync.join is None:
            backward.reduction.tell(CALL_SITE, self.find())

    def find(self) -> CallSite:
        """Return the line that called the running backward. Call this from a hook."""
        frame = _caller(_getframe(1)) or _caller(_current_frames().get(self._main))
        if frame is None:
            return self._unknown
        key = id(frame.f_code), frame.f_lasti
        if key not in self._found:
            self._found[key] = CallSite(frame)
        return self._found[key]


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's program that called the engine, from ``frame``.

    If there is none, return a frame of a library other than torch.
    """
    other: FrameType | None = None
    while frame is not None and frame.f_code.co_name != ENGINE:
        frame = frame.f_back
    while frame is not None:
        is_of_torch = frame.f_globals.get("__name__", "")[:6] == "torch."
        if not is_of_torch and frame.f_code.co_name != MODE:
            if INSTALLED not in frame.f_code.co_filename:
                return frame
            other = other or frame
        frame = frame.f_back
    return other
