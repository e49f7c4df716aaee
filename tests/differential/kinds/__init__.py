"""The kinds of programs: each is a module that draws a program for each seed.

To add an action to a kind, write a class in :mod:`differential.actions`, and draw it in the module
of the kind. For usual and sharded programs :mod:`differential.oracle` computes what all ranks must
see.
"""

from collections.abc import Callable

from differential.kinds import hostile, sharded, usual
from differential.program import Program

KINDS: dict[str, Callable[..., Program]] = {
    "usual": usual.draw,  # what stock DDP defines, and what tritonddp supports in addition
    "sharded": sharded.draw,  # the same with a sharded optimizer
    "hostile": hostile.draw,  # correct under stock DDP, and difficult for a wrapper
}


def program_of(kind: str, seed: int, world_size: int) -> Program:
    """The program of ``seed``, the same on all ranks."""
    return KINDS[kind](seed, world_size)
