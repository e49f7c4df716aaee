"""Scenarios with a sharded optimizer: others, without what that refuses, and with a little more."""

import random
from collections.abc import Iterator
from dataclasses import replace

from differential.scenario import (
    Action,
    Backward,
    BreakOff,
    ReduceGradients,
    Replace,
    Require,
    Scenario,
    Step,
    Swap,
    Write,
    ZeroGrad,
)

_SPARSE = "sparse embedding"
_LONG = 30  # steps


def sharded(scenario: Scenario) -> Scenario:
    """The same with a sharded optimizer, which may have groups, or not all parameters."""
    draw = random.Random(f"{scenario.seed} {scenario.world_size} sharded")
    blocks = tuple("linear" if each == _SPARSE else each for each in scenario.network.blocks)
    return replace(
        scenario,
        network=replace(scenario.network, blocks=blocks),
        options=replace(scenario.options, compression=None),
        communication_hook="",
        # (One that scales .grad scales an earlier mean in it too, which owners alone have.)
        hooks=tuple((block, "tensor") for block, _ in scenario.hooks),
        counts=None,
        over_present=False,
        actions=tuple(_actions(scenario, draw)),
        # (A scaler wants a gradient for its optimizer, and blocks may be left out. Where their
        # buckets stay at home stock divides again what nobody has dropped.)
        groups=draw.choice(
            ["all", "all", "two"]
            if scenario.scaler or scenario.options.skip_all_reduce_unused_params
            else ["all", "all", "two", "some", "later"]
        ),
        is_sharded=True,
    )


def _actions(scenario: Scenario, draw: random.Random) -> Iterator[Action]:
    has_means = False  # .grad does
    for action in scenario.actions:
        if isinstance(action, ZeroGrad | BreakOff):
            has_means = False
        elif isinstance(action, Backward) and action.local and has_means:
            has_means = False
            yield ZeroGrad(True, False)  # else the next reduction is an error
        elif isinstance(action, Backward | ReduceGradients):
            has_means |= not getattr(action, "local", False)
        if isinstance(action, Replace):
            # The optimizer keeps what was replaced: in a long life it would pass for a leak.
            if scenario.actions.count(Step()) >= _LONG:
                action = Require(action.block, True)  # as a new one is trained
            elif action.kind == _SPARSE:
                action = replace(action, kind="linear")
        if isinstance(action, Swap) and action.by == "overwrite":
            action = replace(action, by="swap")  # the groups stay those that they are
        # Gradients that are there for a step may be for the next one.
        skips = draw.random() < 0.08 and not scenario.scaler  # which unscales once before a step
        if not (isinstance(action, Step) and skips):
            yield action
        if isinstance(action, Step) and draw.random() < 0.08:
            yield Write(draw.choice(scenario.network.names))
