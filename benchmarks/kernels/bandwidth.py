"""Flatten and unflatten against stock's ways and against a plain copy of the same bytes.

On a GPU also the sum over three ranks with unflatten, whose buffers are all on the one GPU.

    python benchmarks/plain.py kernels [--only resnet50] [--rounds 25] [--out FILE]
    pytest benchmarks/kernels --benchmark-only [-k resnet50] [--max-mb 250] [--rounds 25]
                              [--benchmark-json FILE]

The ceiling is a device copy of the bytes of the gradients: nothing that reads and writes each once
can be faster. On a GPU there are two, of which neither is always the faster one: torch's ``copy_``,
which lets the driver copy, and a kernel that copies with 16-byte accesses, as ours do. GB/s count
these bytes, read and written, whatever a contender really moves. A bucket is the whole list or the
first that the default cap of 25 MiB closes; *bf16 wire* means gradients in fp32 and a buffer in
bf16, on GPUs alone. Contenders are checked before any is timed. On a GPU times are the device's, on
the CPU those of one thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf, prod
from typing import Any

import deadline
import torch
from contenders import CEILING, DIRECTIONS, Inputs, check, contenders
from deadline import share
from rows import Case, Row
from shapes import BUCKETS, LISTS, Shapes, whole

from tritonddp.cli.kernel_timing.device_timing import WARMUPS, Samples, input_sets, time_rounds
from tritonddp.cli.kernel_timing.paired import Spread, paired_ratio

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 25 if DEVICE.type == "cuda" else 8

# Of the gradients, and of the buffer.
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 wire": (torch.float32, torch.bfloat16),
}


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
        return BUCKETS[self.bucket](whole(self.parameters), DTYPES[self.dtype][0])

    @property
    def megabytes(self) -> float:
        """Of gradients."""
        return sum(map(prod, self.shapes)) * DTYPES[self.dtype][0].itemsize / 1e6

    @property
    def casting(self) -> bool:
        dtype, wire = DTYPES[self.dtype]
        return dtype != wire


# Of the largest bucket, in MB of gradients: the whole of ResNet-50, and smaller, on a CPU.
MAX_MB = inf if DEVICE.type == "cuda" else 110


def cases(max_mb: float = MAX_MB) -> Iterator[Case]:
    """All contenders of all groups, of buckets of at most ``max_mb``."""
    groups = [
        Group(direction, parameters, dtype, bucket)
        for parameters in LISTS
        for dtype in DTYPES
        for bucket in BUCKETS
        for direction in DIRECTIONS
    ]
    for group in groups:
        if not group.shapes or group.megabytes > max_mb:
            continue
        if DEVICE.type == "cpu" and group.casting:
            continue
        for each in contenders(group.direction, group.casting, DEVICE):
            yield Case(str(group), (group, each.name), f"{group}-{each.name}")


def row(case: Case, rounds: int | None, groups_left: int) -> Row:
    """What one contender took, see ``rows.py``."""
    group, contender = case.parts
    measurement = measure(group, rounds or ROUNDS, groups_left)
    samples = measurement.samples[contender]
    ceiling = measurement.samples[CEILING].seconds
    host = Spread.of(samples.host_seconds) if samples.host_seconds else None
    info = {
        "direction": group.direction,
        "parameters": group.parameters,
        "dtype": group.dtype,
        "bucket": group.bucket,
        "contender": contender,
        "tensors": measurement.tensors,
        "bytes": measurement.nbytes,
        "gb_per_s": measurement.nbytes / Spread.of(samples.seconds).median / 1e9,
        "of_ceiling": asdict(paired_ratio(ceiling, samples.seconds)),
        "launches": samples.launches,
        "host_us": host and {name: 1e6 * seconds for name, seconds in asdict(host).items()},
        "input_sets": measurement.input_sets,
        "calls": samples.calls,
        "device": DEVICE.type,
    }
    return Row(samples.seconds, info)


@dataclass(frozen=True)
class Measurement:
    """What the cases of one group share.

    Attributes:
        tensors: gradients in the bucket.
        nbytes: read and written by whoever moves each gradient once.
        input_sets: that rotate.
        samples: by contender.
    """

    tensors: int
    nbytes: int
    input_sets: int
    samples: dict[str, Samples]


@functools.cache  # the first case of a group measures it
def measure(group: Group, rounds: int, groups_left: int) -> Measurement:
    """Check and time all contenders of a group, in its share of the time left.

    Raises:
        RuntimeError: a contender is wrong; none is timed.
    """
    end = share(1 / groups_left)
    dtype, wire = DTYPES[group.dtype]
    rotation = [Inputs.make(group.shapes, dtype, wire, DEVICE)]
    nbytes = rotation[0].nbytes
    rivals = contenders(group.direction, group.casting, DEVICE)
    for contender in rivals:
        check(group.direction, contender, rotation[0])
    count = input_sets(nbytes, DEVICE)
    rotation += [Inputs.make(group.shapes, dtype, wire, DEVICE) for _ in range(count - 1)]
    numbers = deadline.rounds(rounds, end, discarded=WARMUPS)
    samples = time_rounds(rivals, rotation, numbers)
    rotation.clear()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()  # other lists need blocks of other sizes
    return Measurement(len(group.shapes), nbytes, count, samples)


Info = dict[str, Any]


def tables(infos: Sequence[Info]) -> Iterator[str]:
    """For each direction, see :func:`table`."""
    for direction in DIRECTIONS:
        chosen = [info for info in infos if info["direction"] == direction]
        if chosen:
            yield ""
            yield f"{direction} on {chosen[0]['device']}"
            yield from table(chosen)


def table(rows: Sequence[Info]) -> Iterator[str]:
    """A block for each quantity, in it a line for each group, a column for each contender."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    groups: dict[tuple[str, ...], dict[str, Info]] = {}
    for row in rows:
        key = (row["parameters"], row["dtype"], row["bucket"])
        groups.setdefault(key, {})[row["contender"]] = row
    blocks: list[tuple[str, Callable[[Info], str]]] = [
        ("GB/s, read and written", lambda row: f"{row['gb_per_s']:.1f}"),
        ("share of the device copy's", lambda row: f"{row['of_ceiling']['median']:.3f}"),
    ]
    if rows[0]["device"] == "cuda":
        blocks += [
            ("launches", lambda row: str(row["launches"] or "?")),
            ("host, us", lambda row: f"{row['host_us']['median']:.1f}"),
        ]
    for title, cell in blocks:
        shown = [name for name in names if name != CEILING or not title.startswith("share")]
        widths = {name: max(9, len(name) + 2) for name in shown}
        yield ""
        yield f"{title:40}{'tensors':>8}{'MB':>8}" + "".join(
            f"{name:>{width}}" for name, width in widths.items()
        )
        for key, group in groups.items():
            first = next(iter(group.values()))
            yield f"  {' '.join(key):38}{first['tensors']:8d}{first['bytes'] / 1e6:8.1f}" + "".join(
                f"{cell(group[name]) if name in group else '-':>{width}}"
                for name, width in widths.items()
            )
