"""Programs with a sharded optimizer, without what it refuses."""

import random
from collections.abc import Iterator
from dataclasses import replace

from differential.actions import training
from differential.actions.tensors import TENSOR
from differential.kinds import usual
from differential.program import Action, Program

# Refused; and rounded so coarsely that a sum in another order changes much.
_LEFT_OUT = ("sparse embedding", "linear in bf16")


def draw(seed: int, world_size: int) -> Program:
    """The usual program with a sharded optimizer."""
    program, chance = usual.draw(seed, world_size), random.Random(f"{seed} {world_size}")
    blocks = tuple("linear" if each in _LEFT_OUT else each for each in program.network.blocks)
    program = replace(
        program,
        kind="sharded",
        network=replace(program.network, blocks=blocks),
        communication_hook="",
        # A hook that scales .grad also scales an earlier mean, which only owners have.
        hooks=tuple((block, TENSOR, False) for block, _, _ in program.hooks),
        counts=None,
        over_present=False,
        adds_groups=True,
    )
    return replace(program, actions=tuple(_actions(program, chance)))


def _actions(program: Program, chance: random.Random) -> Iterator[Action]:
    has_means = False  # .grad does
    # A gradient that is ready before its backward is noticed cannot be told from an earlier mean.
    is_late = any(getattr(each, "decayed", "") for each in program.actions)
    for action in program.actions:
        is_backward = isinstance(action, training.Backward)
        # Without weight on any rank, the plain wrapper also sets earlier means to zero.
        drops_means = is_backward and not any(action.weights or (1,))
        if isinstance(action, training.ZeroGrad):
            has_means = False
            action = replace(action, set_to_none=action.set_to_none or is_late)
        elif is_backward and has_means and (action.local or is_late or drops_means):
            has_means = not action.local
            yield training.ZeroGrad(True, False)  # else the next reduction is an error
        elif is_backward or isinstance(action, training.ReduceGradients):
            has_means |= not getattr(action, "local", False)
        if isinstance(action, training.Replace) and action.kind in _LEFT_OUT:
            action = replace(action, kind="linear")
        elif isinstance(action, training.Forward):
            action = replace(action, autocast=False)
        if isinstance(action, training.Convert) and action.by == "overwrite":
            action = replace(action, by="data")  # the groups keep their parameters
        # Gradients may wait for the next step.
        if not (isinstance(action, training.Step) and chance.random() < 0.08):
            yield action
