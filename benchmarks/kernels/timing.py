"""Contenders on one bucket: checked, timed in turns, and a row of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.base import deadline
from benchmarks.base.suite import Row
from benchmarks.kernels.contenders import Contender, Inputs, check
from benchmarks.kernels.shapes import Shapes
from tritonddp.cli.kernel_timing.device_timing import WARMUPS, Samples, input_sets, time_rounds
from tritonddp.cli.kernel_timing.paired import Spread, paired_ratio

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def timed(
    direction: str,
    rivals: Sequence[Contender],
    shapes: Shapes,
    dtypes: tuple[torch.dtype, torch.dtype],
    rounds: int,
    end: float,
) -> tuple[int, int, dict[str, Samples]]:
    """Move gradients of these shapes, in rounds until ``end``.

    Args:
        dtypes: of the gradients, and of the buffer.

    Returns:
        Bytes that whoever moves each gradient once reads and writes, how many sets of inputs
        rotated, and the samples of each.

    Raises:
        RuntimeError: a contender is wrong; none is timed.
    """
    make = partial(Inputs.make, shapes, *dtypes, DEVICE)
    rotation = [make()]
    nbytes = rotation[0].nbytes
    for rival in rivals:
        check(direction, rival, rotation[0])
    count = input_sets(nbytes, DEVICE)
    rotation += [make() for _ in range(count - 1)]
    samples = time_rounds(rivals, rotation, deadline.rounds(rounds, end, discarded=WARMUPS))
    rotation.clear()
    forget()
    return nbytes, count, samples


def forget() -> None:
    """Other lists need blocks of other sizes."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def row(samples: Samples, ceiling: Samples, nbytes: int, **named: Any) -> Row:
    """What one contender took, beside a copy of as many bytes; ``named``: what it was."""
    host = Spread.of(samples.host_seconds) if samples.host_seconds else None
    info = {
        **named,
        "bytes": nbytes,
        "gb_per_s": nbytes / Spread.of(samples.seconds).median / 1e9,
        "of_ceiling": asdict(paired_ratio(ceiling.seconds, samples.seconds)),
        "launches": samples.launches,
        "host_us": host and {name: 1e6 * seconds for name, seconds in asdict(host).items()},
        "calls": samples.calls,
        "device": DEVICE.type,
    }
    return Row(samples.seconds, info)
