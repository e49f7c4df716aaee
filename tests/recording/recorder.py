"""The order that streams, events and the host guarantee, and the accesses to memory.

Each stream, and the host, is a *timeline* with a vector clock: the last work of each other timeline
that is known to be complete. If two timelines access the same memory, and one of them writes, the
clock of the second must include the first access. Otherwise a GPU may change their order: a race.
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

DEVICE, CUDA = torch.device("cuda", 0), 1  # the number is of the device type
PACKAGE = str(Path(tritonddp.__file__).parent)
# The frames of these files are between a caller and the recorder.
_PASSED = (
    *(str(Path(module.__file__ or "").parent) for module in (torch, contextlib)),
    *(
        str(Path(__file__).with_name(f"{name}.py"))
        for name in ("recorder", "device", "cuda", "nccl", "kernels", "test_planted_faults")
    ),
)


class Timeline:
    """A stream, with the methods of its ``torch.cuda.Stream`` objects, or the host."""

    _numbers = itertools.count(1)
    device, device_index, device_type = DEVICE, 0, CUDA

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder
        self.stream_id, self.cuda_stream = next(self._numbers), next(self._numbers)
        self.now = 0
        self.clock: dict[Timeline, int] = {self: 0}

    def wait_stream(self, other: Timeline) -> None:
        self.join(other.clock)

    def wait_event(self, event: Any) -> None:
        self.join(event.clock)

    def synchronize(self) -> None:
        self.recorder.host_waits(self.clock, "a stream's synchronize")

    def query(self) -> bool:
        return self.recorder.host.knows_all(self.clock)

    def step(self) -> int:
        """Queue a piece of work."""
        self.now += 1
        self.clock[self] = self.now
        return self.now

    def join(self, clock: dict[Timeline, int]) -> None:
        """Let the next work run after all of ``clock``."""
        for timeline, tick in clock.items():
            if self.clock.get(timeline, 0) < tick:
                self.clock[timeline] = tick

    def knows_all(self, clock: dict[Timeline, int]) -> bool:
        """Whether the next work runs after all of ``clock``."""
        return all(self.clock.get(timeline, 0) >= tick for timeline, tick in clock.items())

    def knows(self, access: Access) -> bool:
        """Whether the next work runs after ``access``."""
        return self.clock.get(access.timeline, 0) >= access.tick


class Access(NamedTuple):
    """One read or write of a range of bytes."""

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
    is_pinned: bool  # on the host, accessible to kernels and copies of the device
    home: Timeline  # the stream on which it was allocated
    accesses: list[Access] = field(default_factory=list)
    guards: set[Timeline] = field(default_factory=set)  # streams of record_stream
    is_captured: bool = False  # a CUDA graph uses it
    is_of_graph: bool = False  # it is in the memory pool of a CUDA graph
    is_packages: bool = False  # allocated by the package


class Wait(NamedTuple):
    """A wait of the host for the device."""

    what: str
    stack: str
    age: int  # steps since the work was queued
    ahead: int  # pieces of work that are queued on the default stream after it

    @property
    def place(self) -> str:
        """File and function of the caller; two files wait on behalf of all others."""
        for frame in self.stack.split(" < "):
            file, _, function = frame.partition(" ")
            if not file.startswith(("_device.py", "coordination/agreement.py")):
                return f"{file.partition(':')[0]} {function}"
        return self.stack


@functools.cache
def _place(file: str) -> str | None:
    """The path in the package, "" for files between a caller and the recorder, else ``None``."""
    if file.startswith(PACKAGE):
        return file.removeprefix(PACKAGE)[1:]
    return "" if file.startswith(_PASSED) or "/unittest/" in file else None


def package_stack() -> str:
    """The four innermost frames of the package, the last one first.

    Empty if the package does not run this itself, but a module that it calls.
    """
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < 4:
        place = _place(frame.f_code.co_filename)
        if place is None and not frames:
            break
        if place:
            frames.append(f"{place}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(frames)


class Recorder:
    """The record of a device.

    Attributes:
        races: accesses without an order, memory that is freed too early, and other errors of a GPU.
        waits: of the host for the device, in code of the package.
        launches: kernels and operations of torch on the device, by name, called by the package.
        collectives: their numbers, by name.
        nbytes, peak: bytes on the device, now and at most.
        capturing: a CUDA graph is being captured, so the host must not query the device.
        has_graph: a graph was captured, and may be replayed.
        captured: the work of the current capture; ``None`` if it will not be replayed.
    """

    def __init__(self) -> None:
        self.host = Timeline("the host", self)
        self.default = Timeline("the default stream", self)
        self.current = self.default
        self.streams = [self.default]
        self.live: dict[int, Memory] = {}
        self.races: list[str] = []
        self.waits: list[Wait] = []
        self.launches: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.capturing = self.has_graph = False
        self.captured: list[Callable[[], object]] | None = None
        self.steps = 0
        self.nbytes = self.peak = 0
        self._hidden: dict[int, tuple[Tensor, bytes]] = {}  # copies to the host, by addresses
        # The last accesses of other streams to memory that is back in the pool of a stream.
        self._left_behind: dict[Timeline, list[Access]] = {}

    # Timelines

    def new_stream(self, name: str) -> Timeline:
        stream = Timeline(f"{name} {len(self.streams)}", self)
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def graph(self) -> Iterator[None]:
        """Context: as ``torch.cuda.graph``, but captured work runs at once."""
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
        """Let replays repeat ``work`` if a graph is being captured."""
        if self.captured is not None:
            self.captured.append(work)

    def host_waits(self, clock: dict[Timeline, int], what: str, age: int = 0) -> None:
        """Let the host wait until the device has completed ``clock``."""
        if stack := package_stack():
            ahead = self.default.now - clock.get(self.default, 0)
            self.waits.append(Wait(what, stack, age, ahead))
            if self.capturing:
                self.races.append(f"{what} while a CUDA graph is captured\n    {stack}")
        self.host.join(clock)
        self._reveal()

    def _reveal(self) -> None:
        """Write the content that :meth:`hide` has hidden."""
        for target, content in self._hidden.values():
            memmove(target.data_ptr(), content, len(content))
        self._hidden.clear()

    def hide(self, target: Tensor) -> None:
        """Let the host read NaN in this copy of device memory until it waits for the device."""
        address, nbytes = target.data_ptr(), target.nbytes
        self._hidden[address] = target, string_at(address, nbytes)
        memset(address, 0xFF, nbytes)

    def step_begins(self) -> None:
        """Reset the counts: a step of the program begins."""
        self.steps += 1
        self.waits.clear()
        self.launches.clear()
        self.collectives.clear()

    # Memory

    def allocated(self, key: int, address: int, nbytes: int, is_pinned: bool = False) -> Memory:
        """New memory, known by ``key``."""
        memory = Memory(address, nbytes, is_pinned, self.current, is_of_graph=self.capturing)
        if not is_pinned:
            self.nbytes += nbytes
            self.peak = max(self.peak, self.nbytes)
            memory.is_packages = bool(package_stack())
            memory.accesses = [  # any freed memory of the pool may be reused here
                each._replace(first=0, end=nbytes)
                for each in self._left_behind.pop(self.current, ())
                if not self.current.knows(each)
            ]
        self.live[key] = memory
        return memory

    def freed(self, key: int, memory: Memory) -> None:
        """The memory is back in the pool of its stream, which may reuse it."""
        if self.live.get(key) is memory:
            del self.live[key]
        if memory.is_pinned:  # the caching host allocator waits for the copies that use it
            if memory.is_captured and self.has_graph:
                self.races.append("pinned memory is freed that a CUDA graph copies")
            return
        self.nbytes -= memory.nbytes
        if memory.is_captured and not memory.is_of_graph and self.has_graph:
            self.races.append(f"{memory.nbytes} bytes are freed that a CUDA graph uses")
        # The pool waits for the queued work of the streams of record_stream. Work for which the
        # host has waited is complete.
        known_by = [memory.home, *memory.guards, self.host]
        for access in memory.accesses:
            if access.timeline in known_by:
                continue
            if not any(timeline.knows(access) for timeline in known_by):
                if not memory.is_packages:  # the program may wait before its stream continues
                    self._left_behind.setdefault(memory.home, []).append(access)
                    continue
                self.races.append(
                    f"memory of {memory.nbytes} bytes from {memory.home.name} is freed before "
                    f"{_text_of(access)}: call record_stream, or let the stream wait"
                )
                return

    def at(self, address: int) -> Memory | None:
        for memory in self.live.values():
            if memory.address <= address < memory.address + max(1, memory.nbytes):
                return memory
        return None

    def touch(
        self, timeline: Timeline, memory: Memory, first: int, end: int, writes: bool, what: str
    ) -> None:
        """Let ``timeline`` read or write bytes ``[first, end)`` of ``memory``."""
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
                self.races.append(f"{_text_of(mine)}, not ordered after {_text_of(access)}")
            # Later comparisons do not need an access that this one follows and covers.
            is_covered = first <= access.first and access.end <= end
            if not (is_behind and is_covered and (writes or not access.writes)):
                kept.append(access)
        kept.append(mine)
        memory.accesses = kept

    def run(self, timeline: Timeline, what: str) -> None:
        """Queue work on ``timeline``, after all work that the host knows to be complete."""
        self.host.step()
        timeline.join(self.host.clock)
        timeline.step()
        if package_stack():
            self.launches[what] += 1

    def report(self) -> str:
        return "\n".join(dict.fromkeys(self.races))


def _text_of(access: Access) -> str:
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
    """The tensors in arguments or results; much faster than ``tree_leaves``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])
