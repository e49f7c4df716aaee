"""torch's symmetric memory for recorded devices: what other ranks read, and when.

Memory is in a file that all ranks map, and a barrier is a collective of gloo at once. What a rank
does to such memory it does on streams of its own, which another one's recorder does not know. So it
is noted behind which barrier each access comes, and before which one: of two accesses of different
ranks, of which one writes, the first must come before a barrier that the second comes behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from recording.recorder import Memory, Recorder, Timeline
from tritonddp import _torch
from tritonddp.comm import symmetric_memory

_NEVER = 2**31


@dataclass
class _Access:
    """Of one rank, to the memory of one.

    Attributes:
        block: which rendezvous its memory is of, on all ranks alike.
        owner: whose memory it is.
        behind, before: numbers of barriers of the block.
    """

    block: int
    owner: int
    first: int
    end: int
    writes: bool
    what: str
    behind: int
    before: int = _NEVER

    def conflicts(self, other: _Access) -> bool:
        """Whether the two, of different ranks, can come in either order, and that matters."""
        return (
            (self.block, self.owner) == (other.block, other.owner)
            and self.first < other.end
            and other.first < self.end
            and (self.writes or other.writes)
            and not (self.before <= other.behind or other.before <= self.behind)
        )


@dataclass
class _Block:
    """A rendezvous: its barriers, and the accesses that no barrier comes behind of yet."""

    number: int
    barriers: list[tuple[Timeline, int]] = field(default_factory=list)
    pending: list[tuple[_Access, Timeline, int]] = field(default_factory=list)

    def behind(self, timeline: Timeline) -> int:
        """The last barrier that what ``timeline`` is given now comes behind."""
        for number in range(len(self.barriers), 0, -1):
            stream, tick = self.barriers[number - 1]
            if timeline.clock.get(stream, 0) >= tick:
                return number
        return 0


class Handle:
    """See :func:`tritonddp._torch.symmetric_rendezvous`."""

    def __init__(self, world: World, block: _Block, group: Any, memory: list[Tensor]) -> None:
        self._world, self._block, self._group, self._memory = world, block, group, memory
        self.rank = dist.get_rank(group)
        self.buffer_ptrs = [each.untyped_storage().data_ptr() for each in memory]

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """On the current stream, and at once."""
        assert channel == 0
        assert timeout_ms > 0
        world, block = self._world, self._block
        recorder = world.recorder
        recorder.run(recorder.current, "barrier")
        pending, block.pending = block.pending, []
        block.barriers.append((recorder.current, recorder.current.now))
        for access, timeline, tick in pending:
            if recorder.current.clock.get(timeline, 0) >= tick:
                access.before = len(block.barriers)
            else:
                block.pending.append((access, timeline, tick))
        with world.without_modes():
            dist.barrier(self._group)


class World:
    """The symmetric memory of this rank's device."""

    def __init__(self, recorder: Recorder, without_modes: Callable[[], Any]) -> None:
        self.recorder, self.without_modes = recorder, without_modes
        self.accesses: list[_Access] = []
        self._places: dict[Memory, tuple[_Block, int]] = {}
        self._files: dict[int, str] = {}
        self._mapped: list[Tensor] = []
        self._blocks = 0
        self._touch = recorder.touch
        recorder.touch = self.touch  # type: ignore[method-assign]

    def _map(self, path: str, nbytes: int) -> Tensor:
        """On the device. What was mapped stays: no other memory comes where dropped one was."""
        self._mapped.append(torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8))
        at = self._mapped[-1].data_ptr()
        tensor = torch.frombuffer((ctypes.c_char * nbytes).from_address(at), dtype=torch.uint8)
        storage = tensor.untyped_storage()
        memory = self.recorder.allocated(storage._cdata, at, nbytes)
        weakref.finalize(storage, self._free, storage._cdata, memory).atexit = False
        return tensor

    def _free(self, key: int, memory: Memory) -> None:
        """torch lets the host wait for the device before."""
        for each in self.recorder.streams:
            self.recorder.host.join(each.clock)
        self.recorder.freed(key, memory)
        self._places.pop(memory, None)

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """See :func:`tritonddp._torch.symmetric_empty`."""
        descriptor = os.memfd_create("recorded")
        os.truncate(descriptor, nbytes)
        with self.without_modes():
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            tensor = self._map(path, nbytes)
            tensor.fill_(171)  # nobody has said that it is zero
        self._files[tensor.data_ptr()] = path
        weakref.finalize(self._mapped[-1].untyped_storage(), os.close, descriptor)
        return tensor

    def rendezvous(self, memory: Tensor, group: Any) -> Handle:
        """See :func:`tritonddp._torch.symmetric_rendezvous`."""
        self._blocks += 1
        block, nbytes = _Block(self._blocks), memory.numel()
        paths: list[Any] = [None] * dist.get_world_size(group)
        with self.without_modes():
            dist.all_gather_object(paths, self._files[memory.data_ptr()], group)
            every = []
            for rank, path in enumerate(paths):
                if rank == dist.get_rank(group):
                    self._places[self.recorder.live[memory.untyped_storage()._cdata]] = block, rank
                    every.append(memory)
                    continue
                theirs = self._map(path, nbytes)
                self._places[self.recorder.live[theirs.untyped_storage()._cdata]] = block, rank
                every.append(theirs)
            dist.barrier(group)
        return Handle(self, block, group, every)

    def touch(
        self, timeline: Timeline, memory: Memory, first: int, end: int, writes: bool, what: str
    ) -> None:
        """See :meth:`Recorder.touch`."""
        self._touch(timeline, memory, first, end, writes, what)
        if memory in self._places and first < end:
            block, owner = self._places[memory]
            behind = block.behind(timeline)
            access = _Access(block.number, owner, first, end, writes, what, behind)
            self.accesses.append(access)
            block.pending.append((access, timeline, timeline.now))

    def compare(self) -> None:
        """What ranks have written with what others have read; all call this, and all are told."""
        if not self._blocks or not dist.is_initialized():
            return
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.accesses)
        for owner, theirs in enumerate(every):
            written = [each for each in theirs if each.writes]
            assert all(each.owner == owner for each in written)
            for rank, accesses in enumerate(every):
                for each in accesses if rank != owner else ():
                    self.recorder.races.extend(
                        f"rank {owner}: {one}, and rank {rank}: {each}"
                        for one in written
                        if one.conflicts(each)
                    )


@contextlib.contextmanager
def patched(recorder: Recorder, without_modes: Callable[[], Any]) -> Iterator[None]:
    """Context: the device has symmetric memory, over NVLink.

    It has the number of its rank there, so that each rank has one of its own.
    """
    world = World(recorder, without_modes)

    introduce = symmetric_memory._introduction

    def introduction(devices: set[torch.device]) -> dict[str, Any]:
        return {**introduce(devices), "card": dist.get_rank()}

    fakes = {
        "symmetric_memory_lack": lambda device: "",
        "nvlinks": lambda device: [18] * dist.get_world_size(),
        "symmetric_empty": world.empty,
        "symmetric_rendezvous": world.rendezvous,
    }
    with (
        mock.patch.multiple(symmetric_memory, _introduction=introduction, **fakes),
        mock.patch.multiple(_torch, **fakes),  # whence a benchmark has them
    ):
        yield
        world.compare()
