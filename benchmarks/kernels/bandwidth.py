"""Flatten and unflatten against stock's ways and against a plain copy of the same bytes.

    python benchmarks/plain.py kernels [--only resnet50] [--rounds 25] [--out FILE]

The ceiling is a device copy of the bytes of the gradients: nothing that reads and writes each once
can be faster. On a GPU there are two, of which neither is always the faster one: torch's ``copy_``,
which lets the driver copy, and a kernel that copies with 16-byte accesses, as ours do. GB/s count
these bytes, read and written, whatever a contender really moves. A bucket is the whole list or the
first that the default cap of 25 MiB closes. Contenders are checked before any is timed. On a GPU
times are the device's, on the CPU those of one thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf, prod

import torch

from benchmarks.base import deadline
from benchmarks.base.suite import Case, Row
from benchmarks.kernels import timing
from benchmarks.kernels.contenders import CEILING, DIRECTIONS, Inputs, check, contenders
from benchmarks.kernels.shapes import BUCKETS, LISTS, Shapes, whole
from benchmarks.kernels.timing import DEVICE, WARMUPS, Samples, input_sets, time_rounds
from benchmarks.report import tables

TABLES = (tables.kernels,)
ROUNDS = 25 if DEVICE.type == "cuda" else 8

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Group:
    """What all contenders are timed on, side by side."""

    direction: str
    parameters: str
    dtype: str
    bucket: str

    def __str__(self) -> str:
        return f"{self.direction}-{self.parameters}-{self.dtype}-{self.bucket}"

    @functools.cached_property
    def shapes(self) -> Shapes:
        """Of the gradients in the bucket; empty if the list does not fill it."""
        return BUCKETS[self.bucket](whole(self.parameters), DTYPES[self.dtype])

    @property
    def megabytes(self) -> float:
        """Of gradients."""
        return sum(map(prod, self.shapes)) * DTYPES[self.dtype].itemsize / 1e6


# Of the largest bucket, in MB of gradients: the whole of ResNet-50, and smaller, on a CPU.
MAX_MB = inf if DEVICE.type == "cuda" else 110


def cases() -> Iterator[Case]:
    """All contenders of all groups, of buckets of at most :data:`MAX_MB`."""
    groups = [
        Group(direction, parameters, dtype, bucket)
        for parameters in LISTS
        for dtype in DTYPES
        for bucket in BUCKETS
        for direction in DIRECTIONS
    ]
    for group in groups:
        if not group.shapes or group.megabytes > MAX_MB:
            continue
        for each in contenders(group.direction, DEVICE):
            yield Case(str(group), (group, each.name), f"{group}-{each.name}")


def row(case: Case, rounds: int | None, groups_left: int) -> Row:
    """What one contender took, see ``base/suite.py``."""
    group, contender = case.parts
    nbytes, count, samples = measure(group, rounds or ROUNDS, groups_left)
    named = {**asdict(group), "contender": contender, "tensors": len(group.shapes)}
    return timing.row(samples[contender], samples[CEILING], nbytes, **named, input_sets=count)


@functools.cache  # the first case of a group measures it
def measure(group: Group, rounds: int, groups_left: int) -> tuple[int, int, dict[str, Samples]]:
    """Check and time all contenders of a group, in its share of the time left.

    Returns:
        Bytes that whoever moves each gradient once reads and writes, how many sets of inputs
        rotated, and the samples of each contender.

    Raises:
        RuntimeError: a contender is wrong; none is timed.
    """
    end = deadline.share(1 / groups_left)
    rivals = contenders(group.direction, DEVICE)
    make = functools.partial(Inputs.make, group.shapes, DTYPES[group.dtype], DEVICE)
    rotation = [make()]
    nbytes = rotation[0].nbytes
    for rival in rivals:
        check(group.direction, rival, rotation[0])
    count = input_sets(nbytes, DEVICE)
    rotation += [make() for _ in range(count - 1)]
    samples = time_rounds(rivals, rotation, deadline.rounds(rounds, end, discarded=WARMUPS))
    rotation.clear()
    timing.forget()
    return nbytes, count, samples
