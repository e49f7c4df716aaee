"""Programs with a sharded optimizer: without what that refuses, and with a little more."""

import random
from collections.abc import Iterator
from dataclasses import replace

from differential.actions.gradients import TENSOR
from differential.actions.training import (
    Backward,
    BreakOff,
    Convert,
    Halve,
    ReduceGradients,
    Replace,
    Require,
    Step,
    ZeroGrad,
)
from differential.kinds import usual
from differential.program import Action, Program

_SPARSE = "sparse embedding"
_LONG = 30  # steps


def draw(seed: int, world_size: int, steps: int = 0) -> Program:
    """The usual one with a sharded optimizer, which may have groups, or not all parameters."""
    program, chance = usual.draw(seed, world_size, steps), random.Random(f"{seed} {world_size}")
    blocks = tuple("linear" if each == _SPARSE else each for each in program.network.blocks)
    return replace(
        program,
        kind="sharded",
        network=replace(program.network, blocks=blocks),
        options=replace(program.options, compression=None),
        communication_hook="",
        # (One that scales .grad scales an earlier mean in it too, which owners alone have.)
        hooks=tuple((block, TENSOR, False) for block, _, _ in program.hooks),
        counts=None,
        over_present=False,
        actions=tuple(_actions(program, chance)),
        # (A scaler wants a gradient for its optimizer, and blocks may be left out. Where their
        # buckets stay at home stock divides again what nobody has dropped.)
        groups=chance.choice(
            ["all", "all", "two"]
            if program.scaler or program.options.skip_all_reduce_unused_params
            else ["all", "all", "two", "some", "later"]
        ),
    )


def _actions(program: Program, chance: random.Random) -> Iterator[Action]:
    has_means = False  # .grad does
    # A gradient that comes before its backward is noticed is not told from a mean that is there.
    is_late = any(
        getattr(each, "decayed", "") or getattr(each, "around", "") for each in program.actions
    )
    for action in program.actions:
        if isinstance(action, BreakOff) and is_late:
            continue  # what its rank makes up for then comes behind such a gradient
        if isinstance(action, ZeroGrad | BreakOff):
            has_means = False
            if isinstance(action, ZeroGrad) and is_late:
                action = replace(action, set_to_none=True)
        elif isinstance(action, Backward) and (action.local or is_late) and has_means:
            has_means = not action.local
            yield ZeroGrad(True, False)  # else the next reduction is an error
        elif isinstance(action, Backward | ReduceGradients):
            has_means |= not getattr(action, "local", False)
        if isinstance(action, Replace):
            # The optimizer keeps what was replaced: in a long life it would pass for a leak.
            if program.actions.count(Step()) >= _LONG:
                action = Require(action.block, True)  # as a new one is trained
            elif action.kind == _SPARSE:
                action = replace(action, kind="linear")
        if isinstance(action, Convert) and action.by == "overwrite":
            action = replace(action, by="data")  # the groups stay those that they are
        # Gradients that are there for a step may be for the next one.
        skips = chance.random() < 0.08 and not program.scaler  # which unscales once before a step
        if not (isinstance(action, Step) and skips):
            yield action
        if isinstance(action, Step) and chance.random() < 0.08:
            yield Halve(chance.choice(program.network.names))
