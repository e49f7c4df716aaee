"""Where in the program ``backward()`` is called: all ranks are in the same place of it, or wrong.

A module that is replicated in place reduces every backward through its parameters. So if one rank
alone makes a backward, for a saliency map say, the others would take it for their next step, and no
number of forwards or backwards tells them apart: each rank has made as many as the others, until
the program ends. What differs is the line that calls ``backward()``.
"""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import PurePath
from sys import _current_frames
from types import CodeType, FrameType

# The function of torch that calls the engine. Below it in the stack are the hooks of a backward, if
# they run on the thread of the caller.
ENGINE = "_engine_run_backward"
# Length of a hash of parameters, see schema_hash().
_NBYTES = 3


class CallSite(dict[bytes, bytes]):
    """A line that calls ``backward()``: maps a hash of parameters to one of them and this line.

    Attributes:
        code, line: of the function, and the number of the line; ``None`` if it is not known.
    """

    code: CodeType | None = None
    line = 0

    def __missing__(self, schema: bytes) -> bytes:
        # (Not of the function: torch.compile makes others of it, perhaps on one rank alone.)
        self[schema] = both = sha256(schema + self._line().encode()).digest()[:_NBYTES]
        return both

    def __str__(self) -> str:
        """The function and the line, for errors."""
        if self.code is None:
            return self._line()
        function = getattr(self.code, "co_qualname", self.code.co_name)  # of Python 3.11
        return f"called in {function} ({self._line()})"

    def _line(self) -> str:
        if self.code is None:
            return "called on another thread than the main one"
        return f"{PurePath(self.code.co_filename).name}:{self.line}"


class CallSites(dict[tuple[int, int], CallSite]):
    """The lines that have called ``backward()`` so far, by the id of their code and place in it.

    A line is the nearest one outside of torch that has called the engine. On a GPU hooks run on
    threads of the engine: then it is looked for in the main thread; if that runs no backward,
    nothing is known, on no rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unknown = CallSite()
        self._main = threading.main_thread().ident or 0

    def find(self, frame: FrameType | None) -> CallSite:
        """The line of ``frame``, which has called the backward that runs; ``None``: look for it."""
        if frame is None:
            frame = _caller(_current_frames().get(self._main))
            if frame is None:
                return self._unknown
        key = id(frame.f_code), frame.f_lasti
        if key not in self:
            site = self[key] = CallSite()
            site.code, site.line = frame.f_code, frame.f_lineno
        return self[key]


def _caller(frame: FrameType | None) -> FrameType | None:
    """The nearest frame outside of torch that has called the engine, seen from ``frame``."""
    while frame is not None and frame.f_code.co_name != ENGINE:
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "")[:6] == "torch.":
        frame = frame.f_back
    return frame
