"""The recorder finds faults that are planted in the CUDA path.

The recorded device does all work immediately, so no fault makes a number wrong here. On a GPU some
faults would, now and then, and others would cost time. ``test_steady_step.py`` finds nothing in the
same programs without a fault.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks
from torch import Tensor

from recording.programs import PROGRAMS, play
from tritonddp._device import Readback
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.quantized import QuantizedAllReduce
from tritonddp.kernels import device_tables, flatten
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.unflatten import JointUnflatten

# The following functions run instead of a function of the package, which is their first argument.


def copy_again_after_the_event(start: Any, readback: Any, tensor: Tensor) -> None:
    start(readback, tensor)
    readback._copy.copy_(tensor, non_blocking=True)


_pinned: list[Tensor] = []  # one buffer for the tables of all buckets


def write_a_pinned_table_too_early(_: Any, target: Tensor, host: Tensor) -> None:
    if not _pinned:
        _pinned.append(torch.empty(4096, dtype=host.dtype, pin_memory=True))
    source = _pinned[0][: host.numel()]
    source.copy_(host)
    target.copy_(source, non_blocking=True)


def let_the_host_read_a_flag(wait: Any, exchange: Any, bucket: Any, work: Any) -> None:
    wait(exchange, bucket, work)
    assert bucket.flat.flags[0].item() >= 0


def round_a_factor(wait: Any, exchange: Any, bucket: Any, work: Any) -> None:
    wait(exchange, bucket, work)
    bucket.flat.data.mul_(torch.ones((), dtype=torch.float64, device="cuda"))


def run_on_another_stream(function: Any, *args: Any) -> Any:
    with torch.cuda.stream(torch.cuda.Stream()):  # not ordered with any other stream
        return function(*args)


def use_addresses_of_freed_gradients(change: Any, tables: Any, *args: Any) -> Any:
    dtype = change(tables, *args)
    tables.dynamic[: len(tables.addresses)] += 2**40
    return dtype


def do_not_wait(launch: Any, *args: Any) -> Any:
    return mock.Mock(kept_alive=launch(*args))


def read_a_buffer_that_is_freed(launch: Any, exchange: Any, bucket: Any, *args: Any) -> Any:
    run_on_another_stream(lambda: torch.empty_like(bucket.flat.data).copy_(bucket.flat.data))
    return launch(exchange, bucket, *args)


# The program, the owner and the name of the replaced function, the function that replaces it, and
# a part of the recorder's report.
FAULTS: list[tuple[str, Any, str, Callable[..., Any], str]] = [
    ("copies", Readback, "start", copy_again_after_the_event, "not ordered after copy"),
    ("weights that change", device_tables, "upload", write_a_pinned_table_too_early, "host writes"),
    ("copies", AllReduce, "wait", let_the_host_read_a_flag, "the host waits"),
    ("copies", AllReduce, "wait", round_a_factor, "rounds an operand"),
    ("copies", flatten, "flatten", run_on_another_stream, "after flatten on side stream"),
    ("copies", JointUnflatten, "__call__", run_on_another_stream, "after unflatten on side stream"),
    ("copies", DeviceTables, "change", use_addresses_of_freed_gradients, "to no memory"),
    ("copies", AllReduce, "launch", do_not_wait, "not ordered after allreduce"),
    ("int8", QuantizedAllReduce, "launch", do_not_wait, "not ordered after reduce_parts"),
    ("lazy buckets", AllReduce, "launch", read_a_buffer_that_is_freed, "is freed before"),
]


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda n: FAULTS[n][3].__name__)
def test_a_planted_fault_is_found(number: int) -> None:
    run_ranks(find, 2, number, interprets=True)


def find(number: int) -> None:
    program, owner, name, fault, expected = FAULTS[number]
    original = getattr(owner, name)

    def replaced(*args: Any, **options: Any) -> Any:
        return fault(partial(original, **options), *args)

    with mock.patch.object(owner, name, replaced):
        found = play(PROGRAMS[program]).recorder
    waits = [f"the host waits: {wait}" for wait in found.waits if not wait.age]
    assert any(expected in each for each in [*found.races, *waits]), found.report()
