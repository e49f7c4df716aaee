"""Collectives of a GPU's tensors as NCCL makes them: on a stream of the group, and by gloo at once.

A collective begins behind what the current stream has been given when it is issued, and whoever
waits for its work makes the current stream wait, not the host. Its tensors are held until then, as
torch's own group for NCCL does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from recording.recorder import Recorder, Timeline

if TYPE_CHECKING:
    from recording.device import Device

# Of each method: which arguments are written, and which are read.
_METHODS = {
    "allreduce": ((0,), (0,)),
    "broadcast": ((0,), (0,)),
    "allgather": ((0,), (1,)),
    "_allgather_base": ((0,), (1,)),
    "allgather_into_tensor_coalesced": ((0,), (1,)),
    "_reduce_scatter_base": ((0,), (1,)),
    "reduce_scatter": ((0,), (1,)),
    "alltoall_base": ((0,), (1,)),
    "all_gather_single": ((0,), (1,)),
    "all_to_all_single": ((0,), (1,)),
    "reduce_scatter_single": ((0,), (1,)),
    "gather": ((0,), (1,)),
    "scatter": ((0,), (1,)),
    "reduce": ((0,), (0,)),
}


# Groups that have made a collective, perhaps in a recording before.
_with_communicator: WeakSet[dist.ProcessGroup] = WeakSet()


class _Method:
    """A method that does not pass for one written in Python: torch's own works' are not."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self._function.__get__(instance, owner)


class RecordedFuture(torch.futures.Future):
    """Of a work: what is chained to it runs on a stream of its own, behind the collective."""

    def __init__(
        self,
        recorder: Recorder,
        clock: dict[Timeline, int],
        value: Any,
        hold: Callable[[Timeline], None],
    ) -> None:
        super().__init__()
        self._recorder, self._clock, self._hold = recorder, clock, hold
        self.set_result(value)

    def wait(self) -> Any:
        self._recorder.current.join(self._clock)
        self._hold(self._recorder.current)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        recorder = self._recorder
        stream, former = recorder.new_stream("a future's stream"), recorder.current
        stream.join(self._clock)
        self._hold(stream)  # as torch's futures do with what they hold
        recorder.current = stream
        try:
            value = callback(self)
        finally:
            recorder.current = former
        if isinstance(value, torch.futures.Future):
            value = value.value()
        return RecordedFuture(recorder, dict(stream.clock), value, self._hold)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(lambda future: callback(future))


class RecordedWork(dist.Work):
    """See ``torch.distributed.Work``."""

    def __init__(
        self,
        recorder: Recorder,
        timeline: Timeline,
        tensors: list[Tensor],
        hold: Callable[[Timeline], None],
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._timeline = timeline
        self._hold = hold
        self._clock = dict(timeline.clock)
        self._tensors = tensors
        self._value = tensors

    def _wait(self, timeout: timedelta | None = None) -> bool:
        self._recorder.current.join(self._clock)
        self._tensors = []
        return True

    def get_future(self) -> RecordedFuture:
        # Who has a future need not wait for the work: torch then holds the tensors until the device
        # is through.
        self._hold(self._timeline)
        return RecordedFuture(self._recorder, self._clock, self._value, self._hold)

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    wait = _Method(_wait)


class _Backend:
    """Of a group, for a GPU's tensors."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.options = backend.options

    def name(self) -> str:
        return "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@contextlib.contextmanager
def patched(device: Device) -> Iterator[None]:
    """Context: groups of gloo are groups of NCCL for tensors on the device."""
    recorder, streams = device.recorder, dict[str, Timeline]()

    def recorded(name: str, original: Any) -> Any:
        written_at, read_at = _METHODS[name]

        def call(group: Any, *arguments: Any, **options: Any) -> Any:
            tensors = _tensors(arguments)
            if not tensors or not any(map(device.has, tensors)):
                return original(group, *arguments, **options)
            for tensor in tensors:
                if not device.has(tensor):
                    recorder.races.append(f"{name} of a tensor on the host, beside others")

            def work() -> None:
                with device.without_modes():
                    original(group, *arguments, **options).wait()

            work()
            recorder.replayable(work)
            timeline = streams.get(group.group_name)
            if timeline is None:
                timeline = streams[group.group_name] = recorder.new_stream("NCCL's stream")
            if group not in _with_communicator:
                _with_communicator.add(group)
                if recorder.capturing:
                    recorder.races.append(f"{name} makes a communicator in a CUDA graph's capture")
            recorder.run(timeline, name)
            timeline.join(recorder.current.clock)
            recorder.collectives[name] += 1
            for places, writes in ((read_at, False), (written_at, True)):
                for place in places:
                    for tensor in _tensors(arguments[place]):
                        device.touch(timeline, tensor, writes, name)
            hold = partial(_hold, tensors, device)
            return RecordedWork(recorder, timeline, _tensors(arguments[written_at[0]]), hold)

        return call

    own_backend = dist.ProcessGroup._get_backend

    def get_backend(group: Any, device: torch.device) -> Any:
        backend = own_backend(group, torch.device("cpu"))
        return _Backend(backend) if torch.device(device).type == "cuda" else backend

    own_new_group = dist.new_group

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any
    ) -> Any:
        return own_new_group(ranks, timeout, "gloo" if backend == "nccl" else backend, **options)

    with contextlib.ExitStack() as stack:
        for name in _METHODS:
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                fake = recorded(name, original)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, fake))
        stack.enter_context(mock.patch.object(dist.ProcessGroup, "_get_backend", get_backend))
        stack.enter_context(mock.patch.object(dist, "new_group", new_group))
        yield


def _hold(tensors: list[Tensor], device: Device, timeline: Timeline) -> None:
    with torch._C.DisableTorchFunction():
        for memory in filter(None, map(device.memory_of, tensors)):
            memory.guards.add(timeline)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
