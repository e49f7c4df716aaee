"""Device time, host time and launches of contenders, in interleaved rounds with cold caches.

Before each sample a buffer of four times the last-level cache is read, and inputs rotate. On a GPU
the time is that between two events behind a sleep that outlasts the host's work, so that launches
do not wait for the host, and what the host takes is measured beside it. Several calls share a pair
of events, each on inputs of its own, so that the events themselves count for little in a small
bucket. (Only as many as fit the queue of launches; a contender that does not fit by itself is
measured with its gaps.) On the CPU, the time is that of the call, on the calling thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.base import deadline
from benchmarks.base.command import Row
from benchmarks.base.paired import Spread, paired_ratio
from benchmarks.step.traffic import launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

_CPU_CACHE = 2**24  # bytes; a guess at a core's share
_CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep; slower clocks only lengthen the sleep
_LONGEST_SLEEP = 20e-3  # seconds; the host's work of more is not waited for
_QUEUE = 512  # launches; the driver queues about twice as many before the host has to wait
WARMUPS = 3  # rounds, for callers of time_rounds


class Inputs(Protocol):
    """What a contender works on, with some memory on its device."""

    @property
    def block(self) -> Tensor: ...


@dataclass(frozen=True)
class Contender:
    """One way to do something: a name, and what does it once with the inputs."""

    name: str
    run: Callable[[Any], object]


@dataclass
class Samples:
    """One contender's rounds.

    Attributes:
        launches: kernels, copies and fills on the device per call; ``None`` where not counted.
        seconds: of a call, on the device; on the CPU, its time.
        host_seconds: until a call returned; empty on the CPU.
    """

    launches: int | None
    calls: int  # between two looks at the clock
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)


def input_sets(nbytes: int, device: torch.device) -> int:
    """How many sets of inputs of ``nbytes`` exceed the cache, at least 2 and at most 8."""
    return min(8, max(2, -(-3 * _cache_bytes(device) // nbytes)))


def time_rounds(
    contenders: Sequence[Contender], rotation: Sequence[Inputs], rounds: Iterable[int]
) -> dict[str, Samples]:
    """Count the launches of the contenders and time them, by name.

    ``rounds`` are their numbers; what is timed in negative ones is discarded.
    """
    device = rotation[0].block.device
    flush = torch.ones(_cache_bytes(device), device=device)  # in fp32: four times the cache
    found: dict[str, Samples] = {}
    ways: dict[str, Callable[[], tuple[float, float]]] = {}
    for contender in contenders:
        for inputs in rotation:  # the first call compiles, and fills the tables of these inputs
            contender.run(inputs)
        launched = launches(partial(contender.run, rotation[0])) if device.type == "cuda" else None
        calls = 1 if launched is None else max(1, min(len(rotation), _QUEUE // launched))
        found[contender.name] = Samples(launched, calls)
        batches, longest = _batches(rotation, calls), [0.0]
        time_one = _on_gpu if device.type == "cuda" else _on_cpu
        ways[contender.name] = partial(time_one, contender, batches, flush, longest)
    for name, samples in deadline.interleaved(ways, rounds).items():
        each = found[name]
        each.seconds = [seconds / each.calls for seconds, _ in samples]
        if device.type == "cuda":
            each.host_seconds = [host / each.calls for _, host in samples]
    return found


def _batches(rotation: Sequence[Inputs], calls: int) -> Iterator[list[Inputs]]:
    inputs = cycle(rotation)
    while True:
        yield list(islice(inputs, calls))


def _on_cpu(
    contender: Contender, batches: Iterator[list[Inputs]], flush: Tensor, _: list[float]
) -> tuple[float, float]:
    flush.sum()
    begun = time.perf_counter()
    for inputs in next(batches):
        contender.run(inputs)
    seconds = time.perf_counter() - begun
    return seconds, seconds


def _on_gpu(
    contender: Contender, batches: Iterator[list[Inputs]], flush: Tensor, longest: list[float]
) -> tuple[float, float]:
    """Seconds of the device and of the host; ``longest`` is what the host took at most before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    flush.sum()  # reads only: no dirty lines that the call would have to write back
    torch.cuda._sleep(int(_CYCLES_PER_SECOND * min(_LONGEST_SLEEP, 2 * longest[0] + 50e-6)))
    start.record()
    begun = time.perf_counter()
    for inputs in next(batches):
        contender.run(inputs)
    host = time.perf_counter() - begun
    end.record()
    torch.cuda.synchronize()
    longest[0] = max(longest[0], host)
    return start.elapsed_time(end) / 1e3, host


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return _CPU_CACHE


def forget() -> None:
    """Other lists need blocks of other sizes."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def row(name: str, samples: Samples, ceiling: Samples, nbytes: int, **named: Any) -> Row:
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
    return Row(name, samples.seconds, info)
