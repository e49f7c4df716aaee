"""Which wire each bucket takes, by the cost model."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from tritonddp.features.auto_compression.cost_model import (
    Compute,
    Load,
    Passage,
    WireCost,
    passage,
    step_seconds,
)
from tritonddp.features.auto_compression.probe import Figures

# A wire that loses something has to promise at least this share of the time. The model is held to
# be within 15% of measured steps, mostly to the same side on all wires: the ratio of two of its
# predictions may be wrong by a fifth before a choice makes a step longer than 1.02 times what it is
# in full precision, since 0.85 * 1.2 = 1.02.
MARGIN = 0.15

# Buckets are looked at in so many runs of neighbours at most: each asks for a prediction.
_RUNS = 16
# Runs whose bytes are hidden so well that they make the step longer by no more than this share of
# it stay in full precision.
_HIDDEN = 0.002

OWN = "own dtype"
BEST = "each its fastest"


@dataclass(frozen=True)
class Candidates:
    """A bucket, and the wires that it may take: that of its gradients' own dtype first."""

    load: Load
    wires: Sequence[WireCost]


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    wires: tuple[str, ...]  # the name of each bucket's
    seconds: float  # predicted, from the start of the backward to the last gradient in .grad
    # The same if all buckets took one wire that may, by its name, OWN first; and BEST.
    predicted: Mapping[str, float]


def choose(buckets: Sequence[Candidates], world_size: int, backward: float, cores: float) -> Choice:
    """The wires with which a backward is predicted to be over soonest.

    A bucket takes another wire than its own only if that, by itself and with nothing hidden, takes
    less time by :data:`MARGIN`, and if it matters: what a backward hides anyway stays in full
    precision. And all take their own if the whole backward does not gain :data:`MARGIN`.

    Buckets come in launch order; ``backward`` is in seconds, without any synchronisation, and for
    ``cores`` see :class:`Compute`.
    """
    compute = Compute.in_proportion([bucket.load for bucket in buckets], backward, cores)
    ways = [
        {wire.name: passage(wire, bucket.load, world_size) for wire in bucket.wires}
        for bucket in buckets
    ]

    def seconds(wires: Sequence[str]) -> float:
        return step_seconds(compute, [way[wire] for way, wire in zip(ways, wires, strict=True)])

    own = [bucket.wires[0].name for bucket in buckets]
    others = list(dict.fromkeys(wire.name for bucket in buckets for wire in bucket.wires[1:]))
    predicted = {OWN: seconds(own)}
    for name in others:
        predicted[name] = seconds([name if name in way else next(iter(way)) for way in ways])
    trials = [[_fastest(way, [name]) for way in ways] for name in others]
    trials.append([_fastest(way, others) for way in ways])
    predicted[BEST] = seconds(trials[-1])
    wires = min(trials, key=seconds)
    best = seconds(wires)
    length = max(1, -(-len(buckets) // _RUNS))
    for first in range(0, len(buckets), length):  # those that are hidden best come first
        run = slice(first, first + length)
        tried = list(wires)
        tried[run] = own[run]
        if tried != wires and (longer := seconds(tried)) <= best * (1 + _HIDDEN):
            wires, best = tried, longer
    if best > (1 - MARGIN) * predicted[OWN]:
        wires, best = own, predicted[OWN]
    return Choice(tuple(wires), best, predicted)


def report(
    choice: Choice,
    buckets: Sequence[Candidates],
    figures: Figures,
    costs: Mapping[torch.dtype, Sequence[WireCost]],
    backward: float,
) -> str:
    """What was chosen and why, in some lines."""
    lines = [
        f'compression="auto", {figures.world_size} ranks; of the slowest rank, measured in '
        f"{figures.took:.1f} s:"
    ]
    for (kind, carried), speed in figures.speeds.items():
        rate = "no time" if speed.byte == 0 else f"{1e-6 / speed.byte:.0f} MB/s sent"
        lines.append(f"  {kind.value} of {carried}: {speed.call * 1e3:.2f} ms a call, {rate}")
    for dtype, of_dtype in costs.items():
        for cost in of_dtype:
            reduce = 0.0 if cost.reduce is None else cost.reduce.element
            kernels = sum((cost.fill.element, reduce, cost.empty.element))
            lines.append(f"  {dtype} as {cost.name}: kernels of {kernels * 1e9:.2f} ns an element")
    lines.append(f"  the backward alone: {backward * 1e3:.1f} ms")
    predicted = (f"{name} {seconds * 1e3:.1f}" for name, seconds in choice.predicted.items())
    lines.append(f"predicted ms of a backward, by wire: {', '.join(predicted)}")
    if choice.seconds == choice.predicted[OWN]:
        lines.append(f"chosen: own dtype, as nothing else is predicted to save {MARGIN:.0%}")
        return "\n".join(lines)
    lines.append(f"chosen: {choice.seconds * 1e3:.1f} ms, with bucket")
    index = 0
    for wire, run in itertools.groupby(choice.wires):
        last = index + len(list(run)) - 1
        elements = sum(bucket.load.total for bucket in buckets[index : last + 1])
        which = f"{index}" if last == index else f"{index} to {last}"
        lines.append(f"  {which}: {wire}, {elements / 1e6:.2f} M elements")
        index = last + 1
    return "\n".join(lines)


def _fastest(ways: Mapping[str, Passage], names: Collection[str]) -> str:
    """Of these wires that which is fastest alone, if it beats the first of ``ways`` by far."""
    own = next(iter(ways))
    name = min(
        (name for name in ways if name in names), key=lambda each: ways[each].alone, default=own
    )
    return name if ways[name].alone <= (1 - MARGIN) * ways[own].alone else own
