"""Flatten and unflatten against stock's ways and against a plain copy of the same bytes.

    python benchmarks/kernels/kernels.py [--only resnet50] [--rounds 25] [--out FILE]

The ceiling is a device copy of the bytes of the gradients: nothing that reads and writes each once
can be faster. On a GPU there are two, of which neither is always the faster one: torch's ``copy_``,
which lets the driver copy, and a kernel that copies with 16-byte accesses, as ours do. GB/s count
these bytes, read and written, whatever a contender really moves. A bucket is the whole list or the
first that the default cap of 25 MiB closes. Contenders are checked before any is timed. On a GPU
times are the device's, on the CPU those of one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import inf, prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch

from benchmarks.base import command, deadline
from benchmarks.base.command import Row
from benchmarks.kernels import timing
from benchmarks.kernels.contenders import CEILING, DIRECTIONS, Inputs, check, contenders
from benchmarks.kernels.shapes import BUCKETS, LISTS, Shapes, whole
from benchmarks.kernels.timing import DEVICE, WARMUPS, input_sets, time_rounds
from benchmarks.report import tables
from benchmarks.report.table import text

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

    @cached_property
    def shapes(self) -> Shapes:
        """Of the gradients in the bucket; empty if the list does not fill it."""
        return BUCKETS[self.bucket](whole(self.parameters), DTYPES[self.dtype])

    @property
    def megabytes(self) -> float:
        """Of gradients."""
        return sum(map(prod, self.shapes)) * DTYPES[self.dtype].itemsize / 1e6


# Of the largest bucket, in MB of gradients: the whole of ResNet-50, and smaller, on a CPU.
MAX_MB = inf if DEVICE.type == "cuda" else 110


def groups() -> Iterator[Group]:
    """Those of buckets of at most :data:`MAX_MB`."""
    for parameters in LISTS:
        for dtype in DTYPES:
            for bucket in BUCKETS:
                for direction in DIRECTIONS:
                    group = Group(direction, parameters, dtype, bucket)
                    if group.shapes and group.megabytes <= MAX_MB:
                        yield group


def measure(group: Group, rounds: int, end: float) -> Iterator[Row]:
    """Check and time all contenders of a group.

    Raises:
        RuntimeError: a contender is wrong; none is timed.
    """
    rivals = contenders(group.direction, DEVICE)
    make = partial(Inputs.make, group.shapes, DTYPES[group.dtype], DEVICE)
    rotation = [make()]
    nbytes = rotation[0].nbytes  # read and written by whoever moves each gradient once
    for rival in rivals:
        check(group.direction, rival, rotation[0])
    count = input_sets(nbytes, DEVICE)
    rotation += [make() for _ in range(count - 1)]
    samples = time_rounds(rivals, rotation, deadline.rounds(rounds, end, discarded=WARMUPS))
    rotation.clear()
    timing.forget()
    for name, found in samples.items():
        named = {**asdict(group), "contender": name, "tensors": len(group.shapes)}
        label = f"{group}-{name}"
        yield timing.row(label, found, samples[CEILING], nbytes, **named, input_sets=count)


def main() -> int:
    measures = {str(group): partial(measure, group) for group in groups()}
    return command.run_suite(
        __doc__, "kernels", measures, ROUNDS, lambda of: text(tables.kernels(of))
    )


if __name__ == "__main__":
    sys.exit(main())
