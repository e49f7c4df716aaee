"""The kernels against torch's and stock DDP's ways, and against a plain copy of the same bytes.

    pytest benchmarks/kernels --benchmark-only [-k "resnet50 and flatten"] [--benchmark-json FILE]

Gradients are flattened into a bucket and back, and quantized, summed and dequantized. The copy
moves the minimum number of bytes that must be read and written, so nothing can be faster. On a GPU
there are two copies, neither of which is always faster: torch's ``copy_``, for which the driver
copies, and a kernel. A bucket is the whole list of parameters, or the first bucket of the default
cap of 25 MiB. Each contender is checked before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from math import inf, prod
from typing import Any

import pytest
import torch

from benchmarks.base import deadline
from benchmarks.kernels.clock import DEVICE, Rotation, seconds
from benchmarks.kernels.contenders import DIRECTIONS
from benchmarks.kernels.directions import CEILING
from benchmarks.kernels.inputs import Inputs
from benchmarks.kernels.shapes import BUCKETS, LISTS, Shapes, whole

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_ROUNDS = 25
# Size of the largest bucket, in MB of gradients.
MAX_MB = inf if DEVICE.type == "cuda" else 64

_rotations: dict[str, Rotation] = {}  # of one bucket: others are released first
_copies: dict[tuple[str, str], float] = {}  # seconds of the plain copy, by group and clock


def cases() -> Iterator[tuple[str, str, str]]:
    """Yield directions, buckets and contenders; the copy that others are compared with first."""
    for bucket in map("-".join, product(LISTS, DTYPES, BUCKETS)):
        shapes, dtype = gradients(bucket)
        if shapes and sum(map(prod, shapes)) * dtype.itemsize <= MAX_MB * 1e6:
            for name, direction in DIRECTIONS.items():
                for contender in direction.contenders(DEVICE):
                    yield name, bucket, contender


def gradients(bucket: str) -> tuple[Shapes, torch.dtype]:
    """Return the dtype and the shapes, which are empty if the list does not fill the bucket."""
    parameters, dtype, part = bucket.split("-")
    return BUCKETS[part](whole(parameters), DTYPES[dtype]), DTYPES[dtype]


def rotation_of(bucket: str) -> Rotation:
    if bucket not in _rotations:
        _rotations.clear()
        _rotations[bucket] = Rotation(partial(Inputs, *gradients(bucket), DEVICE))
    return _rotations[bucket]


def rounds(request: pytest.FixtureRequest, each: float) -> int:
    """Return how many rounds of ``each`` seconds fit into the time."""
    left = len(request.session.items) - request.session.items.index(request.node)
    share = deadline.until(deadline.deadline(), 1 / left) - time.monotonic()
    most, least = map(request.config.getoption, ("benchmark_max_time", "benchmark_min_rounds"))
    return max(least, int(min(MOST_ROUNDS, min(float(most), share) / each)))


def shares(nbytes: int, taken: float, key: tuple[str, str], is_copy: bool) -> dict[str, Any]:
    """Return GB/s, and the share of the copy's rate in this run, if the copy was measured."""
    if is_copy:
        _copies[key] = taken
    copy = _copies.get(key)
    return {"gb_per_s": nbytes / taken / 1e9, "of_copy": copy and copy / taken}


@pytest.mark.benchmark(timer=seconds)
@pytest.mark.parametrize(("direction", "bucket", "contender"), [*cases()])
def test_kernel(
    direction: str, bucket: str, contender: str, benchmark: Any, request: pytest.FixtureRequest
) -> None:
    rotation, task = rotation_of(bucket), DIRECTIONS[direction]
    way = task.contenders(DEVICE)[contender]
    task.check(contender, rotation.sets[0])
    for inputs in rotation.sets:  # the first call compiles, and fills the tables of these inputs
        way(inputs)
    start = seconds()
    way(*rotation.next()[0])
    each = seconds() - start
    benchmark.group = f"{direction} {bucket}"
    benchmark.pedantic(way, setup=rotation.next, rounds=rounds(request, each))
    if benchmark.disabled:
        return
    nbytes, least = task.nbytes(rotation.sets[0]), benchmark.stats.stats.min
    names = dict(zip(("parameters", "dtype", "bucket"), bucket.split("-"), strict=True))
    is_copy = contender == CEILING
    names |= {"direction": direction, "contender": contender}
    benchmark.extra_info |= {**names, "bytes": nbytes, "device": DEVICE.type}
    benchmark.extra_info |= shares(nbytes, least, (benchmark.group, "host"), is_copy)
    if DEVICE.type == "cuda":
        taken = rotation.device_seconds(way, least)
        on_device = shares(nbytes, taken, (benchmark.group, "device"), is_copy)
        benchmark.extra_info["on_device"] = {"us": 1e6 * taken, **on_device}
