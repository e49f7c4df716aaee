"""Faults of the CUDA path, planted one at a time, that the recorder has to find.

The recorded device does all work at once, so no fault makes a number wrong here. On a GPU some
would, now and then, and others would cost time.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp import _device
from tritonddp.buckets import bucket
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm import two_levels
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.quantized import QuantizedAllReduce
from tritonddp.comm.two_levels import TwoLevels
from tritonddp.diagnostics.scalars import Scalars
from tritonddp.kernels import device_tables, flatten, unflatten
from tritonddp.kernels.device_tables import DeviceTables


@dataclass(frozen=True)
class Fault:
    """A fault, which shows as a race, unless ``is_wait`` or ``error`` is given."""

    program: str  # in which it is planted
    plant: Callable[[], contextlib.AbstractContextManager[Any]]  # context with the fault
    is_wait: bool = False  # the host waits for the device
    error: str | None = None  # the message of an error
    elsewhere: bool = False  # see recording.programs.play
    steps: int = 5  # buckets follow the order of gradients after the first one
    is_on_hosts: bool = False  # the program runs on two hosts of two ranks each


FAULTS: dict[str, Fault] = {}


def fault(program: str, owner: Any, name: str, **options: Any) -> Callable[[Any], Any]:
    """Decorator: call the function instead of ``owner.name``, which is its first argument."""
    original = getattr(owner, name)

    def add(instead: Callable[..., Any]) -> Any:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        plant = lambda: mock.patch.object(owner, name, replaced)  # noqa: E731
        FAULTS[f"{instead.__name__}: {owner.__name__}.{name}"] = Fault(program, plant, **options)
        return instead

    return add


@contextlib.contextmanager
def _side() -> Iterator[None]:
    """Context: a stream that no other stream waits for, and that waits for none."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


class _Unawaited:
    """Replaces a work; ``wait()`` does nothing."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        pass


# Copies between host and device


@fault("copies", _device.Readback, "wait", error="reduced different gradients")
def headers_are_read_before_their_copy_is_complete(_: Any, self: _device.Readback) -> Tensor:
    return self._copy


@fault("copies", _device.Readback, "start")
def headers_are_copied_before_their_sum_is_complete(start: Any, self: Any, tensor: Tensor) -> None:
    with _side():
        start(self, tensor)


@fault("copies", _device.Readback, "start")
def the_event_of_a_copy_is_recorded_before_it(start: Any, self: Any, tensor: Tensor) -> None:
    start(self, tensor)
    self._copy.copy_(tensor, non_blocking=True)


_pinned: list[Tensor] = []  # for the tables of all buckets


@fault("weights that change", device_tables, "upload")
def a_pinned_table_is_written_while_it_is_copied(_: Any, target: Tensor, host: Tensor) -> None:
    if not _pinned or not _pinned[0].is_pinned():  # of another recording
        _pinned[:] = [torch.empty(4096, dtype=host.dtype, pin_memory=True)]
    place = _pinned[0][: host.numel()]
    place.copy_(host)
    target.copy_(place, non_blocking=True)


@fault("weights that change", device_tables, "upload", is_wait=True)
def tables_are_copied_from_memory_that_is_not_pinned(_: Any, target: Tensor, host: Tensor) -> None:
    target.copy_(host)


@fault("copies", AllReduce, "wait", is_wait=True)
def the_host_asks_for_a_flag(wait: Any, self: Any, bucket: Any, work: Any) -> None:
    wait(self, bucket, work)
    assert bucket.flat.flags[0].item() >= 0


@fault("copies", AllReduce, "launch", is_wait=True)
def the_host_waits_for_the_stream(launch: Any, *args: Any) -> Any:
    torch.cuda.current_stream().synchronize()
    return launch(*args)


# Work on another stream


@fault("weights that change", device_tables, "upload")
@fault("copies", flatten, "flatten")
@fault("copies", unflatten.JointUnflatten, "__call__", steps=14)
@fault("lazy buckets", unflatten, "unflatten")
@fault("copies", AllReduce, "launch")
@fault("scalars", Scalars, "on_launch")
def it_runs_on_another_stream(function: Any, *args: Any) -> Any:
    with _side():
        return function(*args)


@fault("check_finite", Bucket, "note_not_finite")
def what_is_not_finite_is_noted_on_another_stream(note: Any, *args: Any) -> None:
    with _side():
        note(*args)


@fault("int8", _device.SideStreams, "behind_current")
@contextlib.contextmanager
def the_side_stream_waits_for_nobody(_: Any, *args: Any) -> Iterator[None]:
    with _side():
        yield


@fault("copies", DeviceTables, "change")
def addresses_are_those_of_the_step_before(change: Any, self: Any, *args: Any) -> Any:
    dtype = change(self, *args)
    self.dynamic[: len(self.addresses)] += 2**40  # gradients are no longer there
    return dtype


# Collectives


@fault("copies", AllReduce, "launch")
@fault("int8", QuantizedAllReduce, "launch")
@fault("int8", dist, "all_to_all_single")
@fault("int8", two_levels, "reduce_scatter_single", is_on_hosts=True, steps=3)
@fault("int8", two_levels, "all_gather_single", is_on_hosts=True, steps=3)
def a_collective_is_not_waited_for(launch: Any, *args: Any, **kwargs: Any) -> Any:
    return _Unawaited(launch(*args, **kwargs))


@fault("int8", TwoLevels, "wait", is_on_hosts=True, steps=3)
def the_last_all_gather_is_not_waited_for(_: Any, *args: Any) -> None:
    pass


# Memory


@fault("frozen parameters", bucket, "record_use", elsewhere=True, steps=14)
def the_memory_of_dropped_buckets_is_reused_too_early(_: Any, *memory: Tensor) -> None:
    pass


@fault("lazy buckets", AllReduce, "launch")
def a_buffer_is_freed_before_its_sum_is_complete(
    launch: Any, self: Any, bucket: Any, *args: Any
) -> Any:
    with _side():
        torch.empty_like(bucket.flat.data).copy_(bucket.flat.data)
    return launch(self, bucket, *args)
