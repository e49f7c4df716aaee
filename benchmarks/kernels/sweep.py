"""Which block and how many warps are the best for flatten and unflatten on this GPU?

    python benchmarks/kernels/sweep.py [--lists NAME ...] [--rounds 10] [--out FILE]

For a few buckets, all pairs of a block (elements a program) and a number of warps run in
interleaved rounds beside a device copy of the same bytes, as in ``benchmarks/kernels``; what each
writes is checked first. The table has a line for each bucket, and its best. The result is written
after each bucket.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch

from benchmarks.base import command, deadline
from benchmarks.base.command import Output
from benchmarks.base.results import Result
from benchmarks.kernels.contenders import CEILING, DIRECTIONS, Contender, Inputs
from benchmarks.kernels.shapes import BUCKETS, LISTS, whole
from benchmarks.kernels.timing import timed
from benchmarks.report import tables
from benchmarks.report.table import text
from tritonddp.cli.kernel_timing.paired import Spread, paired_ratio
from tritonddp.kernels.device_tables import BLOCK, WARPS, DeviceTables

CHOICES = [(block, warps) for block in (1024, 2048, 4096) for warps in (4, 8)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of 0.26 to 100 MB of gradients: what a bucket is between the first one and a whole model.
DEFAULT_LISTS = ("many_small", "resnet50", "gpt2_small")


def main() -> int:
    options = _options()
    more = {"launched_with": {"block": BLOCK, "warps": WARPS}}
    output = Output("sweep", options.out, **more)
    buckets = [
        (direction, parameters, dtype, bucket)
        for parameters in options.lists
        for dtype in DTYPES
        for bucket in _buckets(parameters, DTYPES[dtype])
        for direction in ("flatten", "unflatten")
    ]
    rows: list[dict[str, Any]] = []
    for bucket, end in deadline.shares(buckets):
        rows.append(measure(*bucket, options.rounds, end))
        output.write({"rows": rows})
    output.say(*text(tables.sweep(Result(output.content))))
    output.say(f"  (the package launches {named(BLOCK, WARPS)})")
    return 0


def _buckets(parameters: str, dtype: torch.dtype) -> Iterator[str]:
    """The bucket of the default cap; the whole list where it does not fill that."""
    yield "25MiB" if BUCKETS["25MiB"](whole(parameters), dtype) else "whole"


def measure(
    direction: str, parameters: str, dtype: str, bucket: str, rounds: int, end: float
) -> dict[str, Any]:
    """All blocks and warps on one bucket until ``end``, as JSON.

    Raises:
        RuntimeError: one of them is wrong; none is timed.
    """
    shapes = BUCKETS[bucket](whole(parameters), DTYPES[dtype])
    dtypes = DTYPES[dtype], DTYPES[dtype]
    nbytes, _, samples = timed(direction, list(_rivals(direction)), shapes, dtypes, rounds, end)
    ceiling = samples[CEILING].seconds
    found = {
        name: {
            "gb_per_s": nbytes / Spread.of(each.seconds).median / 1e9,
            "of_ceiling": asdict(paired_ratio(ceiling, each.seconds)),
            "rounds": len(each.seconds),
        }
        for name, each in samples.items()
    }
    choices = {name: each for name, each in found.items() if name != CEILING}
    return {
        "direction": direction,
        "parameters": parameters,
        "dtype": dtype,
        "bucket": bucket,
        "tensors": len(shapes),
        "bytes": nbytes,
        "ceiling": found[CEILING],
        "choices": choices,
        "best": max(choices, key=lambda name: choices[name]["gb_per_s"]),
    }


def _rivals(direction: str) -> Iterator[Contender]:
    (plain,) = (each for each in DIRECTIONS[direction] if each.name == "tritonddp")
    (ceiling,) = (each for each in DIRECTIONS[direction] if each.name == CEILING)
    for choice in CHOICES:
        # Tables of their own, by the buffer that they are of.
        yield Contender(named(*choice), partial(_run, choice, {}, plain), ours=True)
    yield ceiling


def named(block: int, warps: int) -> str:
    """A choice, as the table has it."""
    return f"{block} x {warps}"


def _run(
    choice: tuple[int, int], tables: dict[int, DeviceTables], plain: Contender, inputs: Inputs
) -> None:
    """What the package does, with other programs."""
    flat = inputs.ours
    own = tables.get(id(flat))
    if own is None:
        own = tables[id(flat)] = DeviceTables(flat, *choice)
    former, flat.tables = flat.tables, own
    try:
        plain.run(inputs)
    finally:
        flat.tables = former


def _options() -> argparse.Namespace:
    parser = command.parser(__doc__, rounds=10)
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=DEFAULT_LISTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
