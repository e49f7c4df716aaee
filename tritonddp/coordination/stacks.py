"""Where the threads of this process are: used by the errors of collectives and by the hang log."""

from __future__ import annotations

import os
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from tritonddp._torch import frames_of_threads
from tritonddp.coordination.posts import plain

FRAMES = 12  # frames of a stack that are shown
_LINE = 160  # characters of each
_OWN = "tritonddp"  # the names of the threads of this package begin with it
# A thread whose innermost Python is here waits for other ranks.
_WAITING = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(dist.__file__).parent / "distributed_"),
)
# Python here is not the user's own.
_PACKAGES = (
    _WAITING[0],
    str(Path(torch.__file__).parents[1]),
    *sysconfig.get_paths().values(),
    "<",
)


def is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame waits for other ranks."""
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)


def stack_of(frame: FrameType | None) -> list[str]:
    """Frames of a thread, innermost first, those of the user's own code before all others.

    Each is a line ``file:line in function: source``; at most :data:`FRAMES`.
    """
    frames = [*reversed(traceback.extract_stack(frame))] if frame is not None else []
    frames.sort(key=lambda each: each.filename.startswith(_PACKAGES))
    return [
        plain(f"{each.filename}:{each.lineno} in {each.name}: {each.line}", _LINE)
        for each in frames[:FRAMES]
    ]


def others_in_collectives() -> list[str]:
    """The other threads of this process that wait for ranks: name, and innermost line of the user.

    If all of a stack belongs to libraries, the line is that of the innermost caller of torch's or
    this package's collectives.
    """
    frames = frames_of_threads()
    found = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.ident == threading.get_ident() or thread.name.startswith(_OWN):
            continue
        if is_waiting(frame):
            callers = frame
            while callers is not None and is_waiting(callers):
                callers = callers.f_back
            line = [*stack_of(callers or frame), ""][0]
            found.append(f"{plain(repr(thread.name), _LINE)}, at {line}")
    return found
