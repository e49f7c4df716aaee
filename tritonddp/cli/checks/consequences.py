"""What follows from a measured line: the wire of the gradients, and the size of buckets.

By the cost model of ``compression="auto"``, with a model of a given size in fp32: its gradients
have equal sizes, and become ready in proportion to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tritonddp.buckets.assignment import MIB, BucketCaps, assign_buckets
from tritonddp.features.auto_compression.choice import BEST, OWN, Candidates, choose
from tritonddp.features.auto_compression.cost_model import (
    Compute,
    Kind,
    Load,
    passage,
    step_seconds,
)
from tritonddp.features.auto_compression.planner import wires
from tritonddp.features.auto_compression.probe import Figures

# Of one gradient, in bytes: small beside any bucket.
_GRADIENT = 256 << 10
# Backwards that are looked at, in seconds.
_BACKWARDS = tuple(base * 10.0**power for power in range(-3, 2) for base in (1, 1.5, 2, 3, 5, 7))
# Sizes of buckets in MiB that are tried beside the default, which is left for a gain of this share.
_SIZES, _GAIN = (1, 2, 4, 8, 16, 32, 64, 128), 0.1
# Of sizes within this share of the fastest one the largest is taken: fewer launches.
_ALIKE = 0.02
_DTYPE = torch.float32
_NAMES = {"float32": "fp32", OWN: "fp32", "bfloat16": "bf16", "int8": "int8", BEST: "a mixture"}


def of(figures: Figures, model_bytes: int, device_type: str) -> dict[str, Any]:
    """What follows from ``figures`` for a model of ``model_bytes`` on this type of device.

    Returns:
        ``all_reduce`` and ``predicted`` (seconds of exchanging all gradients with nothing to hide
        it, in fp32, and by the name of each wire), ``wires`` (a list of the shortest backward in
        seconds and the name of the wire that is chosen from there on), ``default_sizes`` (of
        buckets in fp32, in MiB), ``size`` (better than those by a tenth at least, or ``None``) and
        ``gain`` (the share of the time that it saves).
    """
    costs = wires(figures, _DTYPE)
    few = _buckets(BucketCaps.of(None, None, device_type=device_type, few_bytes=True), model_bytes)
    candidates = [Candidates(load, costs) for load in few]
    chosen: list[tuple[float, str]] = []
    for backward in _BACKWARDS:
        choice = choose(candidates, figures.world_size, backward, figures.cores)
        name = _name(choice.wires, few)
        if not chosen or chosen[-1][1] != name:
            chosen.append((0.0 if not chosen else backward, name))
    alone = choose(candidates, figures.world_size, 0.0, figures.cores).predicted
    default = BucketCaps.of(None, None, device_type=device_type)
    size, gain = _best_size(figures, model_bytes, default)
    return {
        "all_reduce": alone[OWN],
        "predicted": {
            _NAMES.get(name, name): seconds
            for name, seconds in alone.items()
            if name != BEST or seconds < min(alone[each] for each in alone if each != BEST)
        },
        "wires": chosen,
        "default_sizes": [limit / MIB for limit in default.limits],
        "size": size,
        "gain": gain,
    }


def _buckets(caps: BucketCaps, model_bytes: int) -> list[Load]:
    """The loads of buckets of equal gradients."""
    numel = _GRADIENT // _DTYPE.itemsize
    count = max(1, model_bytes // _GRADIENT)
    params = [torch.empty(numel, dtype=_DTYPE, device="meta")] * count
    return [Load(numel * len(each)) for each in assign_buckets(params, range(count), caps)]


def _name(names: Sequence[str], loads: Sequence[Load]) -> str:
    """The name of the wire that most elements take."""
    elements = dict.fromkeys(names, 0)
    for name, load in zip(names, loads, strict=True):
        elements[name] += load.total
    most = max(elements, key=lambda name: elements[name])
    return _NAMES.get(most, most)


def _best_size(
    figures: Figures, model_bytes: int, default: BucketCaps
) -> tuple[float | None, float]:
    """The bucket size in MiB for the shortest backward in fp32, and what it saves.

    The backward is as long as its gradients travel.
    """
    cost, world_size = wires(figures, _DTYPE)[0], figures.world_size
    speed = cost.speeds[Kind.ALL_REDUCE]
    # As long as the gradients travel: shorter or longer, and buckets matter less.
    backward = 2 * (world_size - 1) / world_size * model_bytes * speed.byte

    def seconds(caps: BucketCaps) -> float:
        loads = _buckets(caps, model_bytes)
        compute = Compute.in_proportion(loads, backward, figures.cores)
        return step_seconds(compute, [passage(cost, load, world_size) for load in loads])

    usual = seconds(default)
    times = {size: seconds(BucketCaps.of(size, None)) for size in _SIZES}
    least = min(times.values())
    best = max(size for size, took in times.items() if took <= (1 + _ALIKE) * least)
    gain = 1 - times[best] / usual
    return (float(best), gain) if gain >= _GAIN else (None, 0.0)
