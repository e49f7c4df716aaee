"""Faults of a CUDA path, one at a time, that the recorder has to find.

No number is wrong by any of them here, where all work is done at once: on a GPU some would be, now
and then, and others would cost time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp import _device
from tritonddp.buckets import bucket, formats
from tritonddp.comm import quantized
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.kernels import device_tables, dispatch, flatten, unflatten
from tritonddp.kernels.device_tables import DeviceTables


@dataclass(frozen=True)
class Fault:
    """A fault, and how it shows.

    Attributes:
        program: in which.
        plant: context in which it is there.
        is_wait: the host waits; else there is a race.
        elsewhere, steps: see :func:`recording.programs.play`. Buckets follow the order of gradients
            after the first step, and headers are read in the next one.
    """

    program: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    is_wait: bool = False
    elsewhere: bool = False
    steps: int = 5


FAULTS: dict[str, Fault] = {}


def fault(program: str, **options: Any) -> Callable[[Callable[[], Iterator[Any]]], None]:
    """Decorator: between its start and its end the fault is there."""

    def add(plant: Callable[[], Iterator[Any]]) -> None:
        FAULTS[plant.__name__] = Fault(program, contextlib.contextmanager(plant), **options)

    return add


def _elsewhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on a stream that nobody waits for, and that waits for nobody."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return function(*args, **kwargs)

    return call


class _Never:
    """In the place of a work."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Waits for nothing."""


# Copies between host and device


@fault("copies")
def headers_are_read_before_the_copy_is_there() -> Iterator[None]:
    with mock.patch.object(_device.Readback, "wait", lambda self: self._copy):
        yield


@fault("copies")
def headers_are_copied_before_their_sum_is_there() -> Iterator[None]:
    start = _device.Readback.start

    def early(self: _device.Readback, tensor: Tensor, work: Any = None) -> None:
        start(self, tensor, _Never(work))

    with mock.patch.object(_device.Readback, "start", early):
        yield


@fault("copies")
def the_event_of_a_copy_comes_before_it() -> Iterator[None]:
    start = _device.Readback.start

    def early(self: _device.Readback, tensor: Tensor, work: Any = None) -> None:
        start(self, tensor, work)
        self._copy.copy_(tensor, non_blocking=True)

    with mock.patch.object(_device.Readback, "start", early):
        yield


@fault("weights, views")
def a_pinned_table_is_written_while_it_is_copied() -> Iterator[None]:
    pinned: dict[int, Tensor] = {}

    def upload(target: Tensor, host: Tensor) -> None:
        place = pinned.setdefault(host.numel(), torch.empty_like(host, pin_memory=True))
        place.copy_(host)
        target.copy_(place, non_blocking=True)

    with mock.patch.object(device_tables, "upload", upload):
        yield


@fault("weights, views", is_wait=True)
def tables_are_copied_from_memory_that_is_not_pinned() -> Iterator[None]:
    with mock.patch.object(device_tables, "upload", Tensor.copy_):
        yield


@fault("weights, views")
def tables_go_up_on_another_stream() -> Iterator[None]:
    with mock.patch.object(device_tables, "upload", _elsewhere(_device.upload)):
        yield


@fault("copies", is_wait=True)
def the_host_asks_for_a_flag() -> Iterator[None]:
    wait = AllReduce.wait

    def asking(self: AllReduce, run: Any, bucket: Any) -> Any:
        factor = wait(self, run, bucket)
        assert bucket.flat.flags[0].item() >= 0
        return factor

    with mock.patch.object(AllReduce, "wait", asking):
        yield


@fault("copies", is_wait=True)
def the_host_waits_for_the_stream() -> Iterator[None]:
    launch = AllReduce.launch

    def waiting(self: AllReduce, *args: Any) -> None:
        torch.cuda.current_stream().synchronize()
        launch(self, *args)

    with mock.patch.object(AllReduce, "launch", waiting):
        yield


# Kernels


@fault("copies")
def gradients_are_flattened_on_another_stream() -> Iterator[None]:
    with _kernels(flatten=_elsewhere(flatten.flatten)):
        yield


@fault("copies")
def gradients_are_unflattened_on_another_stream() -> Iterator[None]:
    with _kernels(unflatten=_elsewhere(unflatten.unflatten)):
        yield


@fault("check_finite")
def marks_are_cleared_on_another_stream() -> Iterator[None]:
    def flattened(flat: Any, *args: Any) -> None:
        flatten.flatten(flat, *args)
        with torch.cuda.stream(torch.cuda.Stream()):
            flat.marks.zero_()

    with _kernels(flatten=flattened):
        yield


@fault("copies")
def addresses_are_those_of_the_step_before() -> Iterator[None]:
    update = DeviceTables.update

    def stale(self: DeviceTables, grads: Any, *args: Any) -> Any:
        kept = vars(self).setdefault("kept", [[each.data_ptr() for each in grads], None])
        if len(args) == 3 and kept[1] is None:
            kept[1] = update(self, grads, *args)
        # Gradients come and go: other memory is where they were.
        words = self._table.words
        words[: len(kept[0])] = [address + 2**40 for address in kept[0]]
        device_tables.upload(self.dynamic, torch.tensor(words))
        return grads[0].dtype

    with mock.patch.object(DeviceTables, "update", stale):
        yield


def _kernels(**others: Any) -> Any:
    choose = formats.select

    def select(*args: Any) -> Any:
        return dispatch.replace(choose(*args), **others)

    return mock.patch.object(formats, "select", select)


# Collectives


@fault("copies")
def the_sum_is_not_waited_for() -> Iterator[None]:
    with _works(AllReduce):
        yield


@fault("copies")
def the_sum_is_begun_on_another_stream() -> Iterator[None]:
    launch = AllReduce.launch

    def elsewhere(self: AllReduce, *args: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            launch(self, *args)

    with mock.patch.object(AllReduce, "launch", elsewhere):
        yield


def _works(transport: Any) -> Any:
    launch = transport.launch

    def launched(self: Any, run: Any, *args: Any) -> None:
        launch(self, run, *args)
        run.works[-1] = _Never(run.works[-1])

    return mock.patch.object(transport, "launch", launched)


@fault("int8")
def the_all_to_all_is_not_waited_for() -> Iterator[None]:
    send = dist.all_to_all_single

    def sent(*args: Any, **kwargs: Any) -> Any:
        return _Never(send(*args, **kwargs))

    with mock.patch.object(dist, "all_to_all_single", sent):
        yield


@fault("int8")
def the_side_stream_waits_for_nobody() -> Iterator[None]:
    @contextlib.contextmanager
    def behind_nobody(self: Any, device: torch.device, *memory: Tensor) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield

    with mock.patch.object(_device.SideStreams, "behind_current", behind_nobody):
        yield


@fault("int8")
def the_sums_are_not_waited_for() -> Iterator[None]:
    with _works(quantized.QuantizedAllReduce):
        yield


# Memory


@fault("frozen parameters", elsewhere=True, steps=14)
def buckets_that_are_dropped_give_their_memory_back_at_once() -> Iterator[None]:
    def nothing(*memory: Tensor) -> None:  # a mock would keep it
        pass

    with mock.patch.object(bucket, "let_go", nothing):
        yield


@fault("lazy buckets")
def a_buffer_goes_before_its_sum_is_there() -> Iterator[None]:
    launch = AllReduce.launch

    def launched(self: AllReduce, run: Any, bucket: Any, *args: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty_like(bucket.flat.data).copy_(bucket.flat.data)
        launch(self, run, bucket, *args)

    with mock.patch.object(AllReduce, "launch", launched):
        yield
