"""Flatten and unflatten against stock's ways and against a plain copy of the same bytes.

The ceiling is a device copy of the bytes of the gradients: nothing that reads and writes each once
can be faster. GB/s count these bytes, read and written, whatever a contender really moves.

Caches are cold: before each call a buffer of several times the last-level cache is read, and
inputs rotate. On a GPU the time is that between two events behind a sleep that outlasts the host's
work, so that launches do not wait for the host; what the host takes is measured beside it. (A
contender with more launches than the queue holds, about 1,000, is measured with its gaps.)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from contenders import CEILING, DIRECTIONS, Contender, Inputs, check
from paired import Spread, paired_ratio
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_CPU_CACHE = 2**25  # bytes; a guess at a core's share
_CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep; faster clocks only shorten the sleep


@dataclass(frozen=True)
class Speed:
    """One contender on one parameter list.

    Attributes:
        device_seconds: of a call; on the CPU, its time.
        host_seconds: until the call returned, median; on the CPU ``None``.
        gb_per_s: useful bytes read and written per device second, median.
        of_ceiling: bandwidth as a share of the device copy's, median over rounds.
        launches: kernels and copies on the device per call; ``None`` where not counted.
        raw_seconds: the rounds.
    """

    device_seconds: Spread
    host_seconds: float | None
    gb_per_s: float
    of_ceiling: float
    launches: int | None
    raw_seconds: list[float]


def measure(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Check, count and time all contenders on one parameter list; what JSON says about it."""
    cache = _cache_bytes(device)
    first = Inputs.make(shapes, dtype, device)
    check(first)
    copies = min(8, max(2, -(-3 * cache // (2 * first.nbytes))))
    rotation = [first, *(Inputs.make(shapes, dtype, device) for _ in range(copies - 1))]
    flush = torch.ones(cache, device=device)  # in fp32: four times the cache
    result: dict[str, Any] = {
        "tensors": len(shapes),
        "bytes": first.nbytes,
        "input_sets": copies,
    }
    for direction, contenders in DIRECTIONS.items():
        time_all = _cuda_rounds if device.type == "cuda" else _cpu_rounds
        seconds, host = time_all(contenders, rotation, flush, rounds)
        result[direction] = {}
        for name, contender in contenders.items():
            spread = Spread.of(seconds[name])
            speed = Speed(
                spread,
                Spread.of(host[name]).median if host else None,
                2 * first.nbytes / spread.median / 1e9,
                paired_ratio(seconds[CEILING], seconds[name]).median,
                _launches(contender, first) if device.type == "cuda" else None,
                seconds[name],
            )
            result[direction][name] = asdict(speed)
    return result


Samples = dict[str, list[float]]


def _in_rounds(contenders: dict[str, Contender], rotation: Sequence[Inputs], rounds: int) -> Any:
    """Calls in the order in which they are timed: round, name, call.

    Rounds below zero are warm-ups: one over all inputs, in which kernels are compiled and tables
    built, and another in which everything runs as in the timed rounds.
    """
    shuffle = random.Random(0)
    order = list(contenders)
    for number in range(-2 * len(rotation), rounds):
        shuffle.shuffle(order)
        inputs = rotation[number % len(rotation)]
        for name in order:
            yield number, name, _call(contenders[name], inputs)


def _call(contender: Contender, inputs: Inputs) -> Callable[[], None]:
    return lambda: contender(inputs)


def _cpu_rounds(
    contenders: dict[str, Contender],
    rotation: Sequence[Inputs],
    flush: torch.Tensor,
    rounds: int,
) -> tuple[Samples, Samples | None]:
    seconds: Samples = {name: [] for name in contenders}
    for number, name, call in _in_rounds(contenders, rotation, rounds):
        flush.sum()
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        if number >= 0:
            seconds[name].append(elapsed)
    return seconds, None


def _cuda_rounds(
    contenders: dict[str, Contender],
    rotation: Sequence[Inputs],
    flush: torch.Tensor,
    rounds: int,
) -> tuple[Samples, Samples | None]:
    seconds: Samples = {name: [] for name in contenders}
    host: Samples = {name: [] for name in contenders}
    longest = dict.fromkeys(contenders, 0.0)
    for number, name, call in _in_rounds(contenders, rotation, rounds):
        torch.cuda.synchronize()
        flush.sum()  # reads only: no dirty lines that the call would have to write back
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(_CYCLES_PER_SECOND * (2 * longest[name] + 50e-6)))
        start.record()
        begun = time.perf_counter()
        call()
        elapsed = time.perf_counter() - begun
        end.record()
        torch.cuda.synchronize()
        if number >= -len(rotation):  # the first call of each compiles and takes seconds
            longest[name] = min(20e-3, max(longest[name], elapsed))
        if number >= 0:
            seconds[name].append(start.elapsed_time(end) / 1e3)
            host[name].append(elapsed)
    return seconds, host


def _launches(contender: Contender, inputs: Inputs) -> int | None:
    """What runs on the device during one call: kernels, copies and fills."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        contender(inputs)
        torch.cuda.synchronize()
    on_device = [each for each in profiler.events() if each.device_type == DeviceType.CUDA]
    return len(on_device) or None  # none at all: the profiler cannot look into this device


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return _CPU_CACHE
