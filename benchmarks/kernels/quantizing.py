"""The three quantising kernels against torch's operations and a plain copy of the same bytes.

    python benchmarks/plain.py quantize [--only resnet50] [--rounds 15] [--out FILE]

Time as in ``benchmarks/kernels``. GB/s count the bytes that have to be read and written at least:
gradients, residuals, numbers and scales, for rank 0 of 8.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.base import deadline
from benchmarks.base.deadline import share, until
from benchmarks.base.suite import Case, Row
from benchmarks.kernels import timing
from benchmarks.kernels.quantizers import CEILING, CONTENDERS, Inputs, check, nbytes
from benchmarks.kernels.shapes import MANY_SMALL, whole
from benchmarks.kernels.timing import DEVICE, WARMUPS, Samples, input_sets, time_rounds
from benchmarks.report import tables

TABLES = (tables.kernels,)
ROUNDS = 15 if DEVICE.type == "cuda" else 3
LISTS = (MANY_SMALL, "resnet50")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases() -> Iterator[Case]:
    """All contenders."""
    for parameters in LISTS:
        for dtype in DTYPES:
            for kernel, rivals in CONTENDERS.items():
                group = "-".join((kernel, "int8", parameters, dtype))
                for each in rivals:
                    parts = (parameters, dtype, kernel, each.name)
                    yield Case(group, parts, f"{group}-{each.name}")


def row(case: Case, rounds: int | None, groups_left: int) -> Row:
    """What one contender took, see ``base/suite.py``."""
    parameters, dtype, kernel, contender = case.parts
    buckets_left = -(-groups_left // len(CONTENDERS))
    size, all_samples = measure(parameters, dtype, rounds or ROUNDS, buckets_left)
    samples = all_samples[kernel]
    named = {"direction": kernel, "numbers": "int8", "parameters": parameters, "dtype": dtype}
    named |= {"bucket": "whole", "contender": contender}
    return timing.row(samples[contender], samples[CEILING], size[kernel], **named)


@functools.cache  # the first case of a bucket measures it
def measure(
    parameters: str, dtype: str, rounds: int, buckets_left: int
) -> tuple[dict[str, int], dict[str, dict[str, Samples]]]:
    """Bytes, and the samples of each contender, of each kernel; checked before any is timed."""
    end = share(1 / buckets_left)
    shapes = whole(parameters)
    rotation = [Inputs.make(shapes, DTYPES[dtype], DEVICE)]
    check(rotation[0])
    layout = rotation[0].flat.message_layout
    size = {kernel: nbytes(kernel, layout, DTYPES[dtype]) for kernel in CONTENDERS}
    for _ in range(input_sets(min(size.values()), DEVICE) - 1):
        rotation.append(Inputs.make(shapes, DTYPES[dtype], DEVICE))
    samples = {}
    for number, (kernel, rivals) in enumerate(CONTENDERS.items()):
        stop = until(end, 1 / (len(CONTENDERS) - number))
        numbered = deadline.rounds(rounds, stop, discarded=WARMUPS)
        samples[kernel] = time_rounds(rivals, rotation, numbered)
    rotation.clear()
    timing.forget()
    return size, samples
