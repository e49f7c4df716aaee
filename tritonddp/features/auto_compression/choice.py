"""Which wire each bucket takes, by the cost model.

A *wire* is a way in which gradients are sent: in their own dtype, cast to bf16, or as int8.
"""

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

# A wire that loses precision must be predicted to save at least this share of the time. The model
# is required to be within 15% of measured steps, and mostly errs in the same direction on all
# wires. If the ratio of two predictions is wrong by a factor of 1.2, the chosen step takes at most
# 0.85 * 1.2 = 1.02 times the time of full precision.
MARGIN = 0.15

# Buckets are tried in groups of neighbours, at most so many: each takes a prediction.
_RUNS = 16
# A group stays in full precision if that makes the step longer by no more than this share: the
# backward hides its communication.
_HIDDEN = 0.002

OWN = "own dtype"
BEST = "each its fastest"


@dataclass(frozen=True)
class Candidates:
    """A bucket, and the wires that it may take, its own dtype first."""

    load: Load
    wires: Sequence[WireCost]


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    wires: tuple[str, ...]  # name of the wire of each bucket
    seconds: float  # predicted, from the start of the backward to the last gradient in .grad
    # Predicted if all buckets that may take one wire took it, by its name (OWN first); and BEST.
    predicted: Mapping[str, float]


def choose(buckets: Sequence[Candidates], world_size: int, backward: float, cores: float) -> Choice:
    """Choose the wires for which the model predicts the shortest backward.

    A bucket takes another wire than its own dtype only if that takes less time by :data:`MARGIN`
    for the bucket alone, and only if the backward does not hide its communication anyway. All
    buckets keep their own dtype if the whole backward does not gain :data:`MARGIN`.

    Args:
        buckets: in launch order.
        world_size: number of ranks.
        backward: seconds of a backward without any synchronisation.
        cores: see :class:`Compute`.
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
    for first in range(0, len(buckets), length):  # the first buckets are hidden best
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
    """Lines that tell what was chosen, and why."""
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
    """The wire of ``names`` that is fastest for this bucket alone.

    It must be faster than the first of ``ways``, the own dtype, by :data:`MARGIN`; else that one.
    """
    own = next(iter(ways))
    name = min(
        (name for name in ways if name in names), key=lambda each: ways[each].alone, default=own
    )
    return name if ways[name].alone <= (1 - MARGIN) * ways[own].alone else own
