"""What streams, events and the host have promised each other, and who has touched which memory.

Each stream and the host is a *timeline* with a vector clock: for each other one, how far along that
one is known to be. Of two accesses to the same memory, of which one writes, the first must be in
what the timeline of the second knows of it. Otherwise nothing keeps a GPU from making them in the
other order: a race.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove, memset, string_at
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tritonddp

PACKAGE = str(Path(tritonddp.__file__).parent)
# Whose frames stand between whoever does something and its record.
_PASSED = (
    *(str(Path(module.__file__ or "").parent) for module in (torch, contextlib)),
    *(
        str(Path(__file__).with_name(f"{name}.py"))
        for name in ("recorder", "device", "cuda", "nccl", "kernels", "faults")
    ),
)


class Timeline:
    """A stream, or the host."""

    _numbers = itertools.count(1)

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(self._numbers)
        self.now = 0
        self.clock: dict[Timeline, int] = {self: 0}

    def step(self) -> int:
        """Something more has been given to it."""
        self.now += 1
        self.clock[self] = self.now
        return self.now

    def join(self, clock: dict[Timeline, int]) -> None:
        """What comes from now on comes behind all of ``clock``."""
        for timeline, tick in clock.items():
            if self.clock.get(timeline, 0) < tick:
                self.clock[timeline] = tick

    def knows_all(self, clock: dict[Timeline, int]) -> bool:
        """Whether what comes now is behind all of ``clock``."""
        return all(self.clock.get(timeline, 0) >= tick for timeline, tick in clock.items())

    def knows(self, access: Access) -> bool:
        """Whether what comes now is behind ``access``."""
        return self.clock.get(access.timeline, 0) >= access.tick


class Access(NamedTuple):
    """One read or write of one stretch of memory."""

    timeline: Timeline
    tick: int
    what: str
    first: int  # byte within the memory
    end: int
    writes: bool
    stack: str


@dataclass(eq=False)
class Memory:
    """One allocation."""

    address: int
    nbytes: int
    is_pinned: bool  # on the host: kernels and copies reach it all the same
    home: Timeline  # the stream whose pool it comes from
    accesses: list[Access] = field(default_factory=list)
    guards: set[Timeline] = field(default_factory=set)  # streams of record_stream
    is_captured: bool = False  # a CUDA graph uses it
    is_of_graph: bool = False  # and it comes from its pool
    is_packages: bool = False  # the package has asked for it


class Wait(NamedTuple):
    """The host has waited for the device."""

    what: str
    stack: str
    age: int  # steps since the device was given what it waits for
    ahead: int  # so much the default stream has been given that it need not have done by then

    @property
    def place(self) -> str:
        """File and function outside the rooms that all the others wait through."""
        for frame in self.stack.split(" < "):
            file, _, function = frame.partition(" ")
            if not file.startswith(("_device.py", "coordination/agreement.py")):
                return f"{file.partition(':')[0]} {function}"
        return self.stack


@functools.cache
def _place(file: str) -> str | None:
    """Within the package; empty for what is passed over on the way to a caller; else ``None``."""
    if file.startswith(PACKAGE):
        return file.removeprefix(PACKAGE)[1:]
    return "" if file.startswith(_PASSED) or "/unittest/" in file else None


def by_package() -> bool:
    """Whether the package itself does what happens now, and not a module that it calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if place := _place(frame.f_code.co_filename):
            return True
        if place is None:
            return False
        frame = frame.f_back
    return False


def package_stack() -> str:
    """Where in the package this is: the innermost frames, the last one first; empty outside."""
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < 4:
        if place := _place(frame.f_code.co_filename):
            frames.append(f"{place}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(frames)


class Recorder:
    """See the module.

    Attributes:
        races: what no order separates, memory that is given back too early, reads that are not
            waited for: in words.
        rounded: operands without dimensions that lost precision, in words.
        waits: of the host for the device, by the package.
        launches: of kernels and torch's operations on the device, by name.
        collectives: by name.
        pinned_allocations: those that no free block serves: a GPU may be waited for.
        nbytes, peak: bytes on the device, and the most that there have been.
        capturing: a CUDA graph is being captured: the host must not ask the device anything.
        has_graph: one has been, and may be replayed.
        captured: what a replay of the graph that is captured now will do; ``None`` if it has none.
    """

    def __init__(self) -> None:
        self.host = Timeline("the host")
        self.default = Timeline("the default stream")
        self.current = self.default
        self.streams = [self.default]
        self.live: dict[int, Memory] = {}
        self.races: list[str] = []
        self.rounded: list[str] = []
        self.waits: list[Wait] = []
        self.launches: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.capturing = self.has_graph = False
        self.captured: list[Callable[[], object]] | None = None
        self.steps = 0
        self.pinned_allocations = self.nbytes = self.peak = 0
        self._hidden: dict[int, tuple[Tensor, bytes]] = {}  # copies to the host, by addresses
        # What other streams have done, last, to memory that is back in a stream's pool.
        self._left_behind: dict[Timeline, list[Access]] = {}
        # Of the caching host allocator, for each size: how far what uses a free block has come.
        self._free_pinned: dict[int, list[dict[Timeline, int]]] = {}

    # Timelines

    def new_stream(self, name: str) -> Timeline:
        """A stream that nothing has been given to."""
        stream = Timeline(f"{name} {len(self.streams)}")
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def graph(self) -> Iterator[None]:
        """Context: as ``torch.cuda.graph``, but what is captured runs at once."""
        for each in self.streams:
            self.host.join(each.clock)
        self._reveal()
        former, self.current = self.current, self.new_stream("the captured stream")
        self.capturing = self.has_graph = True
        try:
            yield
        finally:
            self.capturing = False
            former.join(self.current.clock)
            self.current = former

    def replayable(self, work: Callable[[], object]) -> None:
        """The device has been given ``work``, which replays repeat if a graph is captured."""
        if self.captured is not None:
            self.captured.append(work)

    def host_waits(self, clock: dict[Timeline, int], what: str, age: int = 0) -> None:
        """The host stops until the device has come to ``clock``."""
        if by_package():
            stack = package_stack()
            ahead = self.default.now - clock.get(self.default, 0)
            self.waits.append(Wait(what, stack, age, ahead))
            if self.capturing:
                self.races.append(f"{what} while a CUDA graph is captured\n    {stack}")
        self.host.join(clock)
        self._reveal()

    def _reveal(self) -> None:
        """What :meth:`hide` has hidden is there."""
        for target, content in self._hidden.values():
            memmove(target.data_ptr(), content, len(content))
        self._hidden.clear()

    def hide(self, target: Tensor) -> None:
        """The host sees NaN in this copy of the device's memory until it waits for something."""
        address, nbytes = target.data_ptr(), target.nbytes
        self._hidden[address] = target, string_at(address, nbytes)
        memset(address, 0xFF, nbytes)

    def step_begins(self) -> None:
        """A step of the program begins: what is counted begins anew."""
        self.steps += 1
        self.waits.clear()
        self.launches.clear()
        self.collectives.clear()
        self.pinned_allocations = 0

    # Memory

    def allocated(self, key: int, address: int, nbytes: int, is_pinned: bool = False) -> Memory:
        """There is new memory, which ``key`` stands for."""
        memory = Memory(address, nbytes, is_pinned, self.current, is_of_graph=self.capturing)
        if is_pinned:
            free = self._free_pinned.setdefault(_rounded(nbytes), [])
            over = next((clock for clock in free if self.host.knows_all(clock)), None)
            if over is not None:
                free.remove(over)
            else:
                self.pinned_allocations += 1
        else:
            self.nbytes += nbytes
            self.peak = max(self.peak, self.nbytes)
            memory.is_packages = by_package()
            memory.accesses = [  # it may be that memory: whatever was given back first is used
                each._replace(first=0, end=nbytes)
                for each in self._left_behind.pop(self.current, ())
                if not self.current.knows(each)
            ]
        self.live[key] = memory
        return memory

    def freed(self, key: int, memory: Memory) -> None:
        """Nobody holds it any more: the stream that it comes from may use it for something else."""
        if self.live.get(key) is memory:
            del self.live[key]
        if memory.is_pinned:  # the caching host allocator waits for the copies that use it
            clock: dict[Timeline, int] = {}
            for access in memory.accesses:
                clock[access.timeline] = max(access.tick, clock.get(access.timeline, 0))
            self._free_pinned[_rounded(memory.nbytes)].append(clock)
            if memory.is_captured and self.has_graph:
                self.races.append("pinned memory is given back that a CUDA graph copies")
            return
        self.nbytes -= memory.nbytes
        if memory.is_captured and not memory.is_of_graph and self.has_graph:
            self.races.append(f"{memory.nbytes} bytes are given back that a CUDA graph uses")
        # Its pool waits for the streams of record_stream, as far as they have come by now; and what
        # the host has waited for is over.
        known_by = [memory.home, *memory.guards, self.host]
        for access in memory.accesses:
            if access.timeline in known_by:
                continue
            if not any(timeline.knows(access) for timeline in known_by):
                if not memory.is_packages:  # the program may wait before its stream goes on
                    self._left_behind.setdefault(memory.home, []).append(access)
                    continue
                self.races.append(
                    f"memory of {memory.nbytes} bytes from {memory.home.name} is given back, and "
                    f"{_told(access)} may still be under way: record_stream, or let the stream "
                    "wait"
                )
                return

    def at(self, address: int) -> Memory | None:
        """The memory that this address is in."""
        for memory in self.live.values():
            if memory.address <= address < memory.address + max(1, memory.nbytes):
                return memory
        return None

    def touch(
        self, timeline: Timeline, memory: Memory, first: int, end: int, writes: bool, what: str
    ) -> None:
        """``timeline`` reads or writes bytes ``[first, end)`` of ``memory``."""
        if first >= end:
            return
        memory.is_captured |= self.capturing and timeline is not self.host
        mine = Access(timeline, timeline.now, what, first, end, writes, package_stack())
        kept = []
        for access in memory.accesses:
            if access.end <= first or end <= access.first:
                kept.append(access)
                continue
            is_behind = access.timeline is timeline or timeline.knows(access)
            if (writes or access.writes) and not is_behind:
                self.races.append(f"{_told(mine)}, not ordered behind {_told(access)}")
            # What this one is behind of, and covers, orders nothing any more.
            is_covered = first <= access.first and access.end <= end
            if not (is_behind and is_covered and (writes or not access.writes)):
                kept.append(access)
        kept.append(mine)
        memory.accesses = kept

    def run(self, timeline: Timeline, what: str) -> None:
        """The host gives ``timeline`` something to do: it is behind all that the host knows."""
        self.host.step()
        timeline.join(self.host.clock)
        timeline.step()
        if by_package():
            self.launches[what] += 1

    def report(self) -> str:
        """All races, one a paragraph."""
        return "\n".join(dict.fromkeys(self.races))


def _rounded(nbytes: int) -> int:
    """To a power of two, as the caching host allocator does."""
    return 1 << max(0, nbytes - 1).bit_length()


def _told(access: Access) -> str:
    verb = "writes" if access.writes else "reads"
    text = f"{access.what} on {access.timeline.name} {verb} bytes {access.first} to {access.end}"
    return f"{text} ({access.stack})" if access.stack else text


def extent(offset: int, shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[int, int]:
    """First byte and end of a tensor within its storage."""
    if 0 in shape:
        return offset * size, offset * size
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return offset * size, (last + 1) * size


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those that an operation is given, or returns: much quicker than ``tree_leaves``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])
