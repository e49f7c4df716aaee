"""The kinds of programs: each is a module that draws a program for each seed.

usual     what stock DDP defines, and what tritonddp supports in addition
sharded   the same with a sharded optimizer
hostile   programs that are correct under stock DDP and difficult for a wrapper

To add an action to a kind, draw it in its module. A new action is a class in
:mod:`differential.actions`. For usual and sharded programs :mod:`differential.oracle` computes what
all ranks must see.
"""

from collections.abc import Callable

from differential.kinds import hostile, sharded, usual
from differential.program import Program

KINDS: dict[str, Callable[..., Program]] = {
    "usual": usual.draw,
    "sharded": sharded.draw,
    "hostile": hostile.draw,
}


def program_of(kind: str, seed: int, world_size: int) -> Program:
    """The program of ``seed``, the same on all ranks."""
    return KINDS[kind](seed, world_size)
