"""Collectives of tensors on the device, as with NCCL; gloo runs them immediately.

A collective runs on a stream of the group, after the queued work of the current stream. Waiting for
it makes the current stream wait, not the host. Its tensors are kept alive until then, as in torch.
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

from recording.recorder import Recorder, Timeline, tensors_in

if TYPE_CHECKING:
    from recording.device import Device

# Methods that write and read their first argument; the others write the first and read the second.
_IN_PLACE = ("allreduce", "broadcast", "reduce")
_METHODS = (
    *_IN_PLACE,
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall_base", "all_to_all_single", "gather", "scatter"),
)

# Groups that have run a collective, perhaps in an earlier recording.
_with_communicator: WeakSet[dist.ProcessGroup] = WeakSet()


class RecordedFuture(torch.futures.Future):
    """The future of a work: its callbacks run on another stream, after the collective."""

    def __init__(
        self,
        recorder: Recorder,
        clock: dict[Timeline, int],
        value: Any,
        hold: Callable[[Timeline], None],
    ) -> None:
        super().__init__()
        self._recorder, self._clock, self.hold = recorder, clock, hold
        self.set_result(value)

    def join(self) -> None:
        """The current stream waits."""
        self._recorder.current.join(self._clock)

    def wait(self) -> Any:
        self.join()
        self.hold(self._recorder.current)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        recorder, stream = self._recorder, self._recorder.new_stream("a future's stream")
        stream.join(self._clock)
        self.hold(stream)  # as torch's futures do with their tensors
        with mock.patch.object(recorder, "current", stream):
            value = callback(self)
        if isinstance(value, torch.futures.Future):
            value = value.value()
        return RecordedFuture(recorder, dict(stream.clock), value, self.hold)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(lambda future: callback(future))


class RecordedWork(dist.Work):
    """See ``torch.distributed.Work``."""

    def __init__(self, future: RecordedFuture, timeline: Timeline) -> None:
        super().__init__()
        self._future, self._timeline = future, timeline

    @property
    def wait(self) -> Callable[..., bool]:
        """A property, because the package detects works whose ``wait`` is written in Python."""
        return self._wait

    def _wait(self, timeout: timedelta | None = None) -> bool:
        self._future.join()
        return True

    def get_future(self) -> RecordedFuture:
        # Code with a future need not wait for the work, so torch keeps the tensors until the
        # collective is complete.
        self._future.hold(self._timeline)
        return self._future

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None


class _Backend:
    """The backend of a group for tensors of a GPU."""

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
        read_at = 0 if name in _IN_PLACE else 1

        def call(group: Any, *arguments: Any, **options: Any) -> Any:
            tensors = [*tensors_in(arguments)]
            if not tensors or not any(map(device.has, tensors)):
                return original(group, *arguments, **options)
            if not all(map(device.has, tensors)):
                recorder.races.append(f"{name} of tensors on the host and on the device")

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
            written = [*tensors_in(arguments[0])]
            for tensor in tensors_in(arguments[read_at]):
                device.touch(timeline, tensor, False, name)
            for tensor in written:
                device.touch(timeline, tensor, True, name)
            hold = partial(device.guard, tensors)
            future = RecordedFuture(recorder, dict(timeline.clock), written, hold)
            return RecordedWork(future, timeline)

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
