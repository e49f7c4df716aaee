"""How fast are the network between the ranks, and the kernels of this device? Takes about a second.

This measures the figures of the cost model: some collectives, and the kernels that fill and empty
buckets. All ranks use the figures of the slowest rank. A network of 100 Mbit/s takes a second, a
faster one less. The module, its gradients and all random states are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import settle
from tritonddp._torch import all_gather_single
from tritonddp.buckets.bucket import Bucket
from tritonddp.coordination.collectives import all_gather, all_reduce
from tritonddp.coordination.point_to_point import all_to_all
from tritonddp.coordination.processes import Process, usable_cores
from tritonddp.features.auto_compression.cost_model import Kernel, Kind, Speed, sent_bytes

# Bytes of the messages that are timed. The size is multiplied by four until a message takes longer
# than _LONG seconds, and longer than _LATENCIES empty messages. The first size is larger than the
# burst that rate limits (token buckets) of slow networks let through.
_FIRST_SIZE, _LAST_SIZE = 256 << 10, 64 << 20
_LONG, _LATENCIES = 0.03, 10
# Rounds of all timings, of which the fastest counts. No round begins after _PATIENCE seconds.
_REPETITIONS, _PATIENCE = 8, 0.25

# Gradients of each timed bucket (on a CPU each is packed in a launch of its own), timed passes, and
# below the elements of each gradient.
_GRADIENTS, _PASSES = 4, 3
# Bytes written between two passes, so that no cache holds residuals and buffers, as in a step.
_CACHES = 64 << 20
_FEW, _MANY = 1 << 10, 1 << 20


# Tag of the messages over gloo, below the tags of :mod:`tritonddp.comm.quantized`.
_TAG = 0x7D0FFFFF


@dataclass(frozen=True)
class Way:
    """How buckets of one gradient dtype travel on one wire."""

    # From index, number of the first parameter, parameters and names.
    make: Callable[[int, int, list[Parameter], list[str]], Bucket]
    collectives: Sequence[tuple[Kind, torch.dtype]]  # in order, with the dtype of the messages
    # Steps after the bucket is filled, with the figure to which their time belongs: "reduce",
    # "empty", or None for a step that stands in for a collective.
    steps: Sequence[tuple[str | None, Callable[[Bucket], object]]] = (
        ("empty", methodcaller("unpack")),
    )


@dataclass(frozen=True)
class Figures:
    """What was measured, alike on all ranks."""

    world_size: int
    cores: float  # CPU cores for each rank, as in the cost model's Compute
    seconds: Mapping[str, float]  # times of the slowest rank, by the name of the figure
    took: float  # seconds of the measurement

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Dtypes of the gradients whose buckets were timed."""
        names = {name.partition(" as ")[0] for name in self.seconds if " as " in name}
        return [getattr(torch, name) for name in sorted(names)]

    @property
    def speeds(self) -> dict[tuple[Kind, str], Speed]:
        """The speeds of all timed collectives, by kind and the name of a dtype."""
        found = {}
        for name in self.seconds:
            what, is_call, _ = name.rpartition(": call")
            if is_call:
                kind, _, dtype = what.rpartition(" ")
                found[Kind(kind), dtype] = self.speed(Kind(kind), getattr(torch, dtype))
        return found

    def speed(self, kind: Kind, dtype: torch.dtype) -> Speed:
        name = f"{kind.value} {name_of(dtype)}"
        return Speed(*(self.seconds[f"{name}: {what}"] for what in ("call", "byte", "core")))

    def kernel(self, dtype: torch.dtype, wire: str, step: str) -> Kernel:
        """``step`` is ``"fill"``, ``"reduce"`` or ``"empty"``."""
        name = f"{name_of(dtype)} as {wire}: {step}"
        return Kernel(self.seconds[f"{name}, launch"], self.seconds[f"{name}, element"])


def measure(
    group: dist.ProcessGroup, device: torch.device, ways: Mapping[torch.dtype, Mapping[str, Way]]
) -> Figures:
    """Time collectives of ``group``, and buckets. Collective.

    ``ways`` maps the dtype of gradients and the name of the wire to a way; alike on all ranks.
    """
    start = time.perf_counter()
    lines = _Lines(group, device)
    collectives = dict.fromkeys(
        each for of_dtype in ways.values() for way in of_dtype.values() for each in way.collectives
    )
    seconds = lines.time(list(collectives))
    for dtype, of_dtype in ways.items():
        for wire, way in of_dtype.items():
            for what, value in _time_buckets(way, dtype, device).items():
                seconds[f"{name_of(dtype)} as {wire}: {what}"] = value
    # The rank with the fewest cores counts: its reciprocal is the largest.
    cores = _cores(group, device)
    slowest = lines.slowest([*seconds.values(), 1 / cores, time.perf_counter() - start])
    *values, share, took = slowest
    return Figures(
        group.size(),
        cores=1 / share if share else float("inf"),
        seconds=dict(zip(seconds, values, strict=True)),
        took=took,
    )


class _Lines:
    """Times collectives of one group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def time(self, collectives: Sequence[tuple[Kind, torch.dtype]]) -> dict[str, float]:
        """For each: seconds of an empty call, of a sent byte, and of a core for a sent byte."""
        if not collectives:
            return {}
        short = self._fastest([self._collective(*each, 0) for each in collectives])
        size = self._find_size(*collectives[0], short[0][0])
        calls = [self._collective(*each, size) for each in collectives]
        for call in calls:
            call()  # use up the burst that a rate limit lets through
        found: dict[str, float] = {}
        timed = zip(collectives, short, self._fastest(calls), strict=True)
        for (kind, dtype), (least, idle), (wall, core) in timed:
            sent = max(1.0, sent_bytes(kind, size, self._group.size()))
            byte = max(0.0, wall - least) / sent
            name = f"{kind.value} {name_of(dtype)}"
            found[f"{name}: call"] = least
            found[f"{name}: byte"] = byte
            found[f"{name}: core"] = min(byte, max(0.0, core - idle) / sent)
        return found

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The maximum over the ranks of each number. (In fp32: not all devices have fp64.)"""
        values = torch.tensor(seconds, dtype=torch.float32, device=self._device)
        all_reduce(values, self._group, dist.ReduceOp.MAX).wait()
        return values.tolist()

    def _find_size(self, kind: Kind, dtype: torch.dtype, least: float) -> int:
        size = _FIRST_SIZE
        while size < _LAST_SIZE:
            taken, _ = self._timed(self._collective(kind, dtype, size))
            wall, longest = self.slowest([taken, least])
            if wall > max(_LONG, _LATENCIES * longest):
                break
            size *= 4
        return size

    def _fastest(self, calls: Sequence[Callable[[], None]]) -> list[tuple[float, float]]:
        """Wall time and CPU time of each call, the shortest of some rounds.

        Each round times all calls, so that a short disturbance of the machine affects all of them.
        """
        rounds: list[list[tuple[float, float]]] = []
        spent = 0.0
        while len(rounds) < _REPETITIONS and spent < _PATIENCE:
            rounds.append([self._timed(call) for call in calls])
            (passed,) = self.slowest([sum(wall for wall, _ in rounds[-1])])
            spent += passed
        walls_and_cores = (zip(*times, strict=True) for times in zip(*rounds, strict=True))
        return [(min(walls), min(cores)) for walls, cores in walls_and_cores]

    def _timed(self, call: Callable[[], None]) -> tuple[float, float]:
        self.slowest([0.0])  # a barrier, so that all ranks begin together
        core, wall = time.process_time(), time.perf_counter()
        call()
        settle(self._device)
        # A GPU sends by engines of its own.
        busy = time.process_time() - core if self._device.type == "cpu" else 0.0
        return time.perf_counter() - wall, busy

    def _collective(self, kind: Kind, dtype: torch.dtype, size: int) -> Callable[[], None]:
        """A collective of a message of about ``size`` bytes, at least an element for each rank."""
        world_size = self._group.size()
        part = max(1, size // dtype.itemsize // world_size)
        whole = torch.zeros(part * world_size, dtype=dtype, device=self._device)
        if kind is Kind.ALL_REDUCE:
            return lambda: _wait([all_reduce(whole, self._group)])
        other = torch.zeros_like(whole)
        if self._device.type == "cpu":  # as quantised buckets travel there
            rows, sent = whole.view(world_size, -1), other.view(world_size, -1)
            if kind is Kind.ALL_GATHER:
                sent = sent[:1].expand(world_size, -1)
            return lambda: _wait(all_to_all(rows, sent, self._group, _TAG))
        if kind is Kind.ALL_TO_ALL:
            send = partial(dist.all_to_all_single, group=self._group, async_op=True)
            return lambda: _wait([send(whole, other)])
        return lambda: _wait([all_gather_single(whole, other[:part], self._group)])


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _time_buckets(way: Way, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Seconds of each launch and of each element, for each step on a bucket."""
    few = _time_bucket(way, dtype, device, _FEW)
    many = _time_bucket(way, dtype, device, _MANY)
    found = {}
    for step in few:
        element = max(0.0, many[step] - few[step]) / (_GRADIENTS * (_MANY - _FEW))
        found[f"{step}, launch"] = max(0.0, few[step] - element * _GRADIENTS * _FEW)
        found[f"{step}, element"] = element
    return found


def _time_bucket(
    way: Way, dtype: torch.dtype, device: torch.device, numel: int
) -> dict[str, float]:
    """The shortest time in seconds of each step on a bucket, without its collectives."""
    shape = (1 << 10, numel >> 10)  # of two dimensions: vectors are never quantised
    params = [Parameter(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(_GRADIENTS)]
    names = [f"gradient {number}" for number in range(_GRADIENTS)]
    bucket = way.make(1, 0, params, names)
    values = torch.linspace(-1, 1, numel, device=device).to(dtype).view(shape)
    other = torch.empty(_CACHES, dtype=torch.uint8, device=device)
    passes = []
    for _ in range(_PASSES + 1):  # one more: the first compiles and allocates
        other.zero_()
        passes.append(_pass(way, bucket, values))
        for param in params:
            param.grad = None
    return {step: min(each[step] for each in passes[1:]) for step in ("fill", "reduce", "empty")}


def _pass(way: Way, bucket: Bucket, values: Tensor) -> dict[str, float]:
    """Seconds to fill the bucket, to reduce the received messages, and to empty it.

    A bucket is filled in segments (about 4 MiB on the CPU). Each is filled right after a backward
    has made its gradients, since these may then become tensors in the bucket's memory, as in a
    step.
    """
    seconds = dict.fromkeys(("fill", "reduce", "empty", "unasked"), 0.0)

    def timed(name: str, step: Callable[..., object], *args: Any) -> None:
        start = _clock(values.device)
        with torch.no_grad():
            step(*args)
        seconds[name] += _clock(values.device) - start

    bucket.prepare()
    for segment in bucket.segments:
        params = bucket.params[segment.first : segment.last]
        with torch.enable_grad():
            torch.stack([(param * values).sum() for param in params]).sum().backward()
        timed("fill", bucket.pack, segment, [True] * len(params), 1.0)
    if len(bucket.segments) > 1:
        timed("fill", bucket.finish_trailer)
    for name, step in way.steps:
        timed(name or "unasked", step, bucket)
    bucket.release()
    return seconds


def _clock(device: torch.device) -> float:
    """Clock in seconds. With one CPU thread: time on a core only, without waiting for one."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    settle(device)
    return time.perf_counter()


def _cores(group: dist.ProcessGroup, device: torch.device) -> float:
    """Cores of this host for each of its ranks, divided by torch's number of threads."""
    if device.type == "cuda":
        return float("inf")
    process = Process.own()
    identity = f"{process.host} {process.scope.partition('/')[0]}"
    number = int.from_bytes(blake2b(identity.encode(), digest_size=7).digest(), "little")
    mine = torch.tensor([number], device="cpu")
    hosts = all_gather(mine, group)
    return usable_cores() / sum(map(mine.equal, hosts)) / torch.get_num_threads()


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")
