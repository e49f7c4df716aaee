"""Which block and how many warps are the best for flatten and unflatten on this GPU?

    python benchmarks/sweep.py [--lists NAME ...] [--rounds 10] [--out FILE]

For a few buckets, all pairs of a block (elements a program) and a number of warps run in
interleaved rounds beside a device copy of the same bytes, as in ``benchmarks/kernels``; what each
writes is checked first. The table has a line for each bucket, and its best. The result is written
after each bucket.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parent / "kernels"))
sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import deadline
import machine
import torch
from contenders import CEILING, DIRECTIONS, Contender, Inputs, check
from deadline import share
from shapes import BUCKETS, LISTS, whole

from tritonddp.cli.kernel_timing.device_timing import WARMUPS, input_sets, time_rounds
from tritonddp.cli.kernel_timing.paired import Spread, paired_ratio
from tritonddp.kernels.device_tables import BLOCK, WARPS, DeviceTables

CHOICES = [(block, warps) for block in (1024, 2048, 4096) for warps in (4, 8)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of 0.26 to 100 MB of gradients: what a bucket is between the first one and a whole model.
DEFAULT_LISTS = ("many_small", "resnet50", "gpt2_small")


def main() -> int:
    options = _options()
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    buckets = [
        (direction, parameters, dtype, bucket)
        for parameters in options.lists
        for dtype in DTYPES
        for bucket in _buckets(parameters, DTYPES[dtype])
        for direction in ("flatten", "unflatten")
    ]
    rows: list[dict[str, Any]] = []
    for number, bucket in enumerate(buckets):
        rows.append(measure(*bucket, options.rounds, share(1 / (len(buckets) - number))))
        if options.out is not None:
            content = {
                "benchmark": "sweep",
                "machine": facts,
                "load_average_after": machine.describe()["load_average"],
                "launched_with": {"block": BLOCK, "warps": WARPS},
                "rows": rows,
            }
            machine.write_json(options.out, content)
    print("\n".join(table(rows)))
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
    device = torch.device("cuda")
    make = partial(Inputs.make, shapes, DTYPES[dtype], DTYPES[dtype], device)
    rotation = [make()]
    rivals = list(_rivals(direction))
    for rival in rivals:
        check(direction, rival, rotation[0])
    rotation += [make() for _ in range(input_sets(rotation[0].nbytes, device) - 1)]
    samples = time_rounds(rivals, rotation, deadline.rounds(rounds, end, discarded=WARMUPS))
    nbytes = rotation[0].nbytes
    rotation.clear()
    torch.cuda.empty_cache()  # other lists need blocks of other sizes
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


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each bucket: the share of the device copy of each choice, and the best."""
    if not rows:
        return
    names = list(rows[0]["choices"])
    yield ""
    yield f"{'block x warps: share of the device copy':44}{'MB':>8}" + "".join(
        f"{name:>10}" for name in (*names, "best")
    )
    for row in rows:
        group = " ".join(row[key] for key in ("direction", "parameters", "dtype", "bucket"))
        shares = [row["choices"][name]["of_ceiling"]["median"] for name in names]
        yield f"  {group:42}{row['bytes'] / 1e6:8.1f}" + "".join(
            [*(f"{each:10.3f}" for each in shares), f"{row['best']:>10}"]
        )
    yield f"  (the package launches {named(BLOCK, WARPS)})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=DEFAULT_LISTS)
    parser.add_argument("--rounds", type=int, default=10, help="timed, of each bucket (default 10)")
    parser.add_argument("--out", type=Path, help="write JSON here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
