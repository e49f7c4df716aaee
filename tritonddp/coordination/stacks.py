"""Stacks of the threads of this process, for the errors of collectives and the hang log."""

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

FRAMES = 12  # maximum number of frames of a stack in a message
_LINE = 160  # maximum characters per frame
_OWN = "tritonddp"  # prefix of the names of this package's threads
# A thread whose innermost Python frame is here waits for other ranks.
_WAITING = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(dist.__file__).parent / "distributed_"),
)
# Python code here does not belong to the user.
_PACKAGES = (
    _WAITING[0],
    str(Path(torch.__file__).parents[1]),
    *sysconfig.get_paths().values(),
    "<",
)


def is_waiting(frame: FrameType | None) -> bool:
    """Return True if a thread with this innermost frame waits for other ranks."""
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)


def stack_of(frame: FrameType | None) -> list[str]:
    """Return frames of a thread, innermost first; frames of the user's code precede all others.

    Each is a line ``file:line in function: source``; at most :data:`FRAMES`.
    """
    frames = [*reversed(traceback.extract_stack(frame))] if frame is not None else []
    frames.sort(key=lambda each: each.filename.startswith(_PACKAGES))
    return [
        plain(f"{each.filename}:{each.lineno} in {each.name}: {each.line}", _LINE)
        for each in frames[:FRAMES]
    ]


def others_in_collectives() -> list[str]:
    """Return the other threads of this process that wait for ranks, with the user's innermost line.

    If a stack consists of libraries only, use the line of the innermost caller of the collectives
    of torch or this package.
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
