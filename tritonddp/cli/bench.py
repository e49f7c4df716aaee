"""``tritonddp bench``: the kernels of this device beside torch's own operations.

Each kernel is checked, then timed in interleaved rounds with torch's way to do the same and with a
copy of the same bytes. GB/s count the bytes that have to be read and written at least, whatever was
moved; a ratio below 1 says that ours is faster, and its interval is that of 95%.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from math import inf, prod
from statistics import median
from typing import Any

import torch

from tritonddp.cli.kernel_timing import buckets, quantizers
from tritonddp.cli.kernel_timing.device_timing import WARMUPS, input_sets, time_rounds
from tritonddp.cli.kernel_timing.paired import Ratio, paired_ratio
from tritonddp.cli.terminal import bar, whole
from tritonddp.kernels.dispatch import select

Shapes = Sequence[tuple[int, ...]]

# Parameters of a bucket. The last two have 10 and 7 million elements.
MODELS: dict[str, Shapes] = {
    "many_small": ((64,),) * 1000,
    "mlp": ((2048, 784), (2048,), (2048, 2048), (2048,), (2048, 2048), (2048,), (10, 2048), (10,)),
    "transformer": (
        ((2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,))
        + ((768,),) * 4
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KERNELS = (*buckets.DIRECTIONS, *quantizers.CONTENDERS)
_ROUNDS = {"cpu": 11, "cuda": 25}
# Fewer rounds, but not fewer than so many, where all of it would take longer than so many seconds.
_LEAST, _PATIENCE = 4, 45.0


@dataclass(frozen=True)
class Row:
    """One kernel on the gradients of one bucket.

    Attributes:
        kernel, model, dtype: which.
        baseline: what it is compared with.
        tensors, bytes: gradients, and what has to be read and written at least.
        seconds, baseline_seconds, copy_seconds: medians of ours, of the baseline and of the copy.
        ratio: ours over the baseline, by round.
        rounds: that count.
    """

    kernel: str
    model: str
    dtype: str
    baseline: str
    tensors: int
    bytes: int
    seconds: float
    baseline_seconds: float
    copy_seconds: float
    ratio: Ratio
    rounds: int

    @property
    def rate(self) -> float:
        """GB/s of ours."""
        return self.bytes / self.seconds / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a card")
    add("--dtype", choices=DTYPES, nargs="+", default=["fp32"], help="of the gradients")
    names = f"which parameters, of {', '.join(MODELS)}, or shapes such as 4096x1024,4096"
    add("--sizes", type=_sizes, nargs="+", metavar="SIZE", help=names)
    add("--kernels", choices=KERNELS, nargs="+", help="default: those that the device uses")
    most = "at most, that count (default: 11 on a CPU, 25 on a GPU)"
    add("--rounds", type=whole(1), help=most)
    add("--json", action="store_true", help="for programs")


def main(arguments: argparse.Namespace) -> int:
    """Print a table.

    Returns:
        0; 1 if a result is wrong; 2 if the device has no kernels.
    """
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = arguments.sizes or [(name, MODELS[name]) for name in MODELS]
    try:
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device here")
        select(device)
    except RuntimeError as error:
        print(f"tritonddp bench: {error}", file=sys.stderr)
        return 2
    cases = [
        (kernel, name, shapes, dtype)
        for name, shapes in sizes
        for dtype in arguments.dtype
        for kernel in arguments.kernels or KERNELS
    ]
    rounds = arguments.rounds or _ROUNDS[device.type]
    rows = []
    end = time.monotonic()
    try:
        with bar(len(cases), "kernels") as advance:
            for kernel, name, shapes, dtype in cases:
                end += _PATIENCE / len(cases)
                rows.append(measure(kernel, name, shapes, dtype, device, rounds, end))
                advance(1)
    except RuntimeError as error:  # a wrong result is not timed
        print(f"tritonddp bench: {kernel}, {name}, {dtype}: {error}", file=sys.stderr)
        return 1
    print(_as_json(rows, device) if arguments.json else _as_text(rows, device))
    return 0


def measure(
    kernel: str,
    model: str,
    shapes: Shapes,
    dtype: str,
    device: torch.device,
    rounds: int,
    end: float = inf,
) -> Row:
    """Check one kernel, then time it beside its baseline and a copy.

    Args:
        kernel: of :data:`KERNELS`.
        model, shapes: what the parameters are called, and what shapes they have.
        dtype: of :data:`DTYPES`.
        device: of the gradients.
        rounds: how many count, at most.
        end: by ``time.monotonic()``; a round that would end later is left out, but for some.

    Raises:
        RuntimeError: its result, or the baseline's, is wrong.
    """
    contenders: tuple[Any, ...]
    make: Callable[[], Any]
    of = DTYPES[dtype]
    if kernel in buckets.DIRECTIONS:
        contenders = buckets.DIRECTIONS[kernel]
        make = partial(buckets.Inputs.make, shapes, of, of, device)
        first: Any = make()
        for each in contenders:
            buckets.check(kernel, each, first)
        nbytes = first.nbytes
    else:
        contenders = quantizers.CONTENDERS[kernel]
        make = partial(quantizers.Inputs.make, shapes, of, device)
        first = make()
        quantizers.check(first)
        nbytes = quantizers.nbytes(kernel, first.flat.message_layout, of)
    # So many that no cache holds them, as far as a quarter of a GiB.
    count = min(input_sets(nbytes, device), max(2, (256 << 20) // nbytes))
    rotation = [first, *(make() for _ in range(count - 1))]
    samples = time_rounds(contenders, rotation, _numbers(rounds, end))
    ours, baseline, copy = (samples[each.name].seconds for each in contenders)
    return Row(
        kernel,
        model,
        dtype,
        contenders[1].name,
        len(shapes),
        nbytes,
        median(ours),
        median(baseline),
        median(copy),
        ratio=paired_ratio(ours, baseline),
        rounds=len(ours),
    )


def _numbers(rounds: int, end: float) -> Iterator[int]:
    """Numbers of the rounds; those below zero are for warming up."""
    start = time.monotonic()
    for number in range(-WARMUPS, rounds):
        now = time.monotonic()
        if number >= _LEAST and now + (now - start) / (number + WARMUPS) > end:
            return
        yield number


def ran(device: torch.device) -> str:
    """The form of the kernels that runs on ``device``, and where."""
    if device.type == "cuda":
        return f"Triton kernels, {torch.cuda.get_device_name(device)}"
    return f"the kernels' twins in plain torch, {torch.get_num_threads()} threads"


def _as_text(rows: Sequence[Row], device: torch.device) -> str:
    lines = [
        f"tritonddp bench on {device.type}: {ran(device)}, torch {torch.__version__}",
        "",
        f"{'kernel':<17}{'parameters':<13}{'dtype':<6}{'MB':>7}{'us':>10}{'GB/s':>8}"
        f"{'of a copy':>11}{'rounds':>8}  ratio to torch's own [95%]",
    ]
    lines += [
        f"{row.kernel:<17}{row.model:<13.12}{row.dtype:<6}{row.bytes / 1e6:>7.1f}"
        f"{row.seconds * 1e6:>10.1f}{row.rate:>8.1f}{row.copy_seconds / row.seconds:>11.2f}"
        f"{row.rounds:>8}  {row.ratio} {row.baseline}"
        for row in rows
    ]
    return "\n".join(lines)


def _as_json(rows: Sequence[Row], device: torch.device) -> str:
    content = {
        "device": device.type,
        "ran": ran(device),
        "torch": torch.__version__,
        "rows": [asdict(row) | {"gb_per_s": row.rate, "ratio": astuple(row.ratio)} for row in rows],
    }
    return json.dumps(content, indent=1)


def _sizes(text: str) -> tuple[str, Shapes]:
    """Parse a name of :data:`MODELS`, or shapes; returns the name and the shapes."""
    if text in MODELS:
        return text, MODELS[text]
    try:
        shapes = tuple(tuple(map(int, each.split("x"))) for each in text.split(","))
    except ValueError:
        shapes = ()
    if not shapes or any(prod(each) < 1 or min(each) < 1 for each in shapes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(MODELS)}, and no shapes such as 4096x1024,4096"
        )
    return text, shapes
