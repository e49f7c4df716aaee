"""The kinds of programs: each is a module that draws one for each seed.

usual     whatever stock DDP defines, and what this project promises beyond that
sharded   the same with a sharded optimizer
hostile   what is right under stock DDP and hard on a clever wrapper
named     the programs of :mod:`differential.named`, in variants

To add a kind, or an action to one: draw it in its module. An action that is new is a class in
:mod:`differential.actions`, which says what a rank does; where :mod:`differential.oracle` plays the
kind too, what all ranks must see of it is said there.
"""

from collections.abc import Callable

from differential.kinds import hostile, named, sharded, usual
from differential.program import Program

KINDS: dict[str, Callable[..., Program]] = {
    "usual": usual.draw,
    "sharded": sharded.draw,
    "hostile": hostile.draw,
    "named": named.draw,
}


def program_of(kind: str, seed: int, world_size: int) -> Program:
    """The program of ``seed``: always the same one, on every rank."""
    return KINDS[kind](seed, world_size)
