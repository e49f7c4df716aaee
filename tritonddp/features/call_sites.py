"""Where in the program ``backward()`` is called: in the same place on all ranks, or wrong.

A module that is replicated in place reduces every backward through its parameters. So if one rank
alone makes a backward, for a saliency map say, the others would take it for their next step, and no
number of forwards or backwards tells them apart: each rank has made as many as the others, until
the program ends. What differs is the place that calls ``backward()``: the innermost line of the
user's program. (Not the lines that have called that one: rank 0 may well time or log its steps.)
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

# In the path of a file that belongs to an installed library, whose lines all programs share.
INSTALLED = "-packages"
# What a mode or a subclass of tensors runs between the program and ``backward()``.
MODE = "__torch_function__"


class CallSite:
    """A line that calls ``backward()``.

    Attributes:
        name: the function and the line, for errors.
        hash: of the line, 3 bytes. (Not of the function: torch.compile makes others of it, perhaps
            on one rank alone.)
    """

    def __init__(self, frame: FrameType | None) -> None:
        line, self.name = "", "called on another thread"
        if frame is not None:
            code = self._code = frame.f_code  # keeps the key of CallSites its own
            line = f"{PurePath(code.co_filename).name}:{frame.f_lineno}"
            # (The name with the class is of Python 3.11.)
            self.name = f"called in {getattr(code, 'co_qualname', code.co_name)} ({line})"
        self.hash = sha256(line.encode()).digest()[:3]


class _CallSiteField(HeaderField):
    """The :class:`CallSite` of a backward; ``None`` if no call of one counts."""

    size = 3

    def encode(self, value: CallSite | None) -> bytes:
        return bytes(3) if value is None else value.hash

    def check(self, values: Mapping[int, Any], whole: Mapping[int, Any], mine: Any) -> None:
        if differ(whole):
            raise SchemaMismatch(
                options={} if mine is None else {"backward()": mine.name},
                advice="The module is replicated in place: all ranks have to call backward() in "
                "the same line. Put what one rank does alone under no_sync(), or use "
                "torch.autograd.grad: both stay on their rank.",
            )


CALL_SITE = _CallSiteField()


class CallSites(Extension):
    """Tells the other ranks where each reduced backward is called.

    On a GPU hooks run on threads of the engine: then the main thread is looked at; if that runs no
    backward, nothing is known, on no rank.
    """

    def __init__(self, sync: SyncState) -> None:
        self._sync = sync
        # The lines that were found so far, by the id of their code and the place in it.
        self._found: dict[tuple[int, int], CallSite] = {}
        self._unknown = CallSite(None)
        self._main = threading.main_thread().ident or 0

    def on_begin(self, backward: Backward) -> None:
        """Find the line. (Inside ``join()`` ranks without inputs call no backward.)"""
        if backward.reduction is not None and self._sync.join is None:
            backward.reduction.tell(CALL_SITE, self.find())

    def find(self) -> CallSite:
        """The line that has called the backward that runs. To be called from a hook."""
        frame = _caller(_getframe(1)) or _caller(_current_frames().get(self._main))
        if frame is None:
            return self._unknown
        key = id(frame.f_code), frame.f_lasti
        if key not in self._found:
            self._found[key] = CallSite(frame)
        return self._found[key]


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program that has called the engine, from ``frame``.

    Of a library other than torch, if there is no other.
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
