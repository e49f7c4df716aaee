"""The recorder finds faults that are planted in the CUDA path, and nothing without a fault.

The recorded device does all work immediately, so no fault makes a number wrong here. On a GPU some
faults would, now and then, and others would cost time.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks
from torch import Tensor

from recording.programs import PROGRAMS, play
from tritonddp import _device
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.quantized import QuantizedAllReduce
from tritonddp.kernels import device_tables, flatten, unflatten
from tritonddp.kernels.device_tables import DeviceTables


@dataclass(frozen=True)
class Fault:
    """A fault, which appears as a race, or as a wait of the host for the device."""

    program: str  # that runs with the fault
    plant: Callable[[], contextlib.AbstractContextManager[Any]]  # context with the fault
    is_wait: bool = False
    steps: int = 5  # buckets follow the order of gradients after the first one


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
    """Context: a stream that no other stream waits for, and that waits for no other stream."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


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


@fault("copies", AllReduce, "wait", is_wait=True)
def the_host_reads_a_flag(wait: Any, self: Any, bucket: Any, work: Any) -> None:
    wait(self, bucket, work)
    assert bucket.flat.flags[0].item() >= 0


@fault("copies", flatten, "flatten")
@fault("copies", unflatten.JointUnflatten, "__call__", steps=14)
@fault("copies", AllReduce, "launch")
def it_runs_on_another_stream(function: Any, *args: Any) -> Any:
    with _side():
        return function(*args)


@fault("copies", DeviceTables, "change")
def addresses_are_those_of_freed_gradients(change: Any, self: Any, *args: Any) -> Any:
    dtype = change(self, *args)
    self.dynamic[: len(self.addresses)] += 2**40
    return dtype


class _Unawaited:
    """Replaces a work; ``wait()`` does nothing."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        pass


@fault("copies", AllReduce, "launch")
@fault("int8", QuantizedAllReduce, "launch")
def a_collective_is_not_waited_for(launch: Any, *args: Any, **kwargs: Any) -> Any:
    return _Unawaited(launch(*args, **kwargs))


@fault("lazy buckets", AllReduce, "launch")
def a_buffer_is_freed_before_it_has_been_read(
    launch: Any, self: Any, bucket: Any, *args: Any
) -> Any:
    with _side():
        torch.empty_like(bucket.flat.data).copy_(bucket.flat.data)
    return launch(self, bucket, *args)


@pytest.mark.long
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_found(name: str) -> None:
    run_ranks(find, 2, name, interprets=True)


def find(name: str) -> None:
    fault = FAULTS[name]
    sound = play(PROGRAMS[fault.program], fault.steps).recorder
    assert not sound.races, sound.report()
    with fault.plant():
        found = play(PROGRAMS[fault.program], fault.steps).recorder
    if fault.is_wait:
        places = [{each.place for each in run.waits if not each.age} for run in (found, sound)]
        assert places[0] - places[1]
    else:
        assert found.races
