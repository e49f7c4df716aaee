"""The launches, collectives, calls, waits and compiled kernels of a steady step on a GPU.

They are counted on the recorded device. The numbers may only be lowered.
"""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from device_step import step_calls
from distributed import gather, ranks
from torch import nn

from recording.programs import PROGRAMS, WARM_UP, play, running, sound
from tritonddp import DistributedDataParallel
from tritonddp._device import Readback
from tritonddp.buckets.assignment import BucketCaps
from tritonddp.kernels.unflatten import JointUnflatten


@dataclass(frozen=True)
class Step:
    """The counts of one step."""

    buckets: int
    # Launches that pack each bucket, unpack the last one, and unpack all others.
    kernels: int
    collectives: int  # of all kinds
    operations: int = 0  # at most: operations of torch on the device, called by the package
    moves: int = 0  # at most: launches that write addresses of gradients that have moved
    reads: str = ""  # a function in which the host waits for work of this step
    # Otherwise, the host waits here for work of the previous step: its headers.
    before: str = "comm/reduction.py finish"


# Flatten and two kinds of unflatten, for aligned and for misaligned gradients; and addresses.
COMPILED = {"copies": 7, "views": 5, "int8": 10}
_KERNELS = ("flatten", "unflatten", "quantize", "reduce_parts", "dequantize")
STEADY = {
    "copies": Step(2, 4, 2, moves=2),
    "copies, zeroed in place": Step(2, 4, 2),
    "views": Step(2, 2, 2, moves=2),
    "views, zeroed in place": Step(2, 2, 2),
    "weights": Step(2, 4, 2, operations=6, moves=2),
    "unused parameters": Step(
        2, 3, 2, operations=2, moves=1, reads="comm/reduction.py _read_flags"
    ),
    "no_sync": Step(2, 4, 2, moves=2),
    "bf16 wire": Step(2, 4, 2, moves=2),
    "int8": Step(4, 10, 6, moves=4),
    "lazy buckets": Step(2, 4, 2, operations=4, moves=2),
    "communication hook": Step(2, 4, 3, operations=21, moves=2),
    "buffers": Step(2, 4, 3, operations=2, moves=2),
    # The last headers decide which buckets are left out.
    "left-out buckets": Step(2, 2, 1, moves=1, before="reducer/reducer.py check_pending"),
    "scalars": Step(2, 4, 2, operations=11, moves=2),
    "check_finite": Step(
        *(2, 4, 2), operations=23, moves=2, reads="features/check_finite.py on_reduced_all"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(STEADY))
@ranks(2, interprets=True)
def test_a_steady_step_waits_for_the_last_headers_only_and_has_no_race(name: str) -> None:
    expected, played = STEADY[name], play(PROGRAMS[name])
    recorder = played.recorder
    assert not recorder.races, recorder.report()
    launches = recorder.launches
    operations = {each: n for each, n in launches.items() if each.startswith("aten::")}
    assert played.buckets == expected.buckets
    assert sum(launches[each] for each in _KERNELS) == expected.kernels, launches
    assert recorder.collectives.total() == expected.collectives, recorder.collectives
    assert sum(operations.values()) <= expected.operations, operations
    assert launches["addresses"] <= expected.moves
    assert launches["copy to the device"] == 0
    assert launches["copy to the host"] == (2 if expected.reads else 1)
    before = [wait for wait in recorder.waits if wait.age]
    waits = [wait.place for wait in recorder.waits if not wait.age]
    assert waits == ([expected.reads] if expected.reads else []), recorder.waits
    assert [wait.place for wait in before] == ([] if expected.reads else [expected.before])
    assert all(wait.ahead for wait in before), "the device is kept waiting for the host"
    if name in COMPILED:
        assert played.compiled == COMPILED[name]
    assert not played.compiled_late, "a rank compiles while the other ranks wait for it"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in STEADY])
@ranks(2, interprets=True)
def test_another_program_has_no_race_and_compiles_no_kernel_late(name: str) -> None:
    played = play(PROGRAMS[name])
    assert not played.recorder.races, played.recorder.report()
    assert played.compiled
    assert not played.compiled_late, "a rank compiles while the other ranks wait for it"


@pytest.mark.parametrize("moves", [False, True], ids=["steady", "moved"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@ranks(2, interprets=True)
def test_a_bucket_and_the_rest_of_a_step_call_few_functions(views: bool, moves: bool) -> None:
    """Computed from steps with two and with four buckets. ``moved``: gradients have moved.

    The rest has two waits, and two launches that unflatten.
    """
    option = {"gradient_as_bucket_view": views}
    few, many = (step_calls(16, buckets, moves, **option) for buckets in (2, 4))
    of_package = (many.of_package.total() - few.of_package.total()) / 2
    of_others = (many.of_others.total() - few.of_others.total()) / 2
    assert of_package <= (8 if moves else 6), many.of_package
    assert of_others <= (24 if moves else 14), many.of_others
    assert few.of_package.total() - 2 * of_package <= 37, few.of_package


@ranks(2, interprets=True)
def test_default_caps_are_those_for_nccl() -> None:
    largest = BucketCaps.for_nccl().limits[-1]
    with sound():
        net = DistributedDataParallel(nn.Linear(8, 8).to("cuda"))
        net(torch.ones(1, 8, device="cuda")).sum().backward()
        assert net._get_ddp_logging_data()["bucket_cap_bytes"] == largest
        # Dynamo splits its graph by these attributes.
        assert (net.bucket_bytes_cap, net.bucket_bytes_cap_default) == (largest, True)


@ranks(2, interprets=True)
def test_all_buckets_but_the_last_are_unpacked_before_it_is_reduced() -> None:
    # Each launch, the number of its buckets, and the collectives that it does not wait for.
    found: list[tuple[str, int, int]] = []
    with running(PROGRAMS["copies"], WARM_UP) as run:
        recorder = run.recorder
        nccl = next(each for each in recorder.streams if each.name.startswith("NCCL"))
        start, unflatten = Readback.start, JointUnflatten.__call__

        def note(what: str, buckets: int) -> None:
            found.append((what, buckets, nccl.now - recorder.current.clock.get(nccl, 0)))

        def started(*args: Any) -> None:
            note("headers", 0)
            start(*args)

        def unflattened(self: Any, grads: Any, *args: Any) -> None:
            note("unflatten", len(grads))
            unflatten(self, grads, *args)

        with (
            mock.patch.object(Readback, "start", started),
            mock.patch.object(JointUnflatten, "__call__", unflattened),
        ):
            run.step()
    assert found == [("headers", 0, 1), ("unflatten", 1, 1), ("unflatten", 1, 0)]


@ranks(2, interprets=True)
def test_scalars_are_summed_on_the_device() -> None:
    with running(PROGRAMS["scalars"], 4) as run:
        found = run.net.reduced_scalars()
        total = sum(gather(run.x.sum().item()))
        assert found["loss"].sum.device.type == "cuda"
        assert (found["loss"].sum.item(), found["loss"].mean.item()) == (total, total / 2)
        assert found["tokens"].sum.item() == len(run.x) * 2


@ranks(2, interprets=True)
def test_all_ranks_stop_after_the_same_step(rank: int) -> None:
    """One step later than on a CPU, because a header is read before the next reduction."""
    with running(PROGRAMS["copies"], WARM_UP) as run:
        if rank == 1:
            run.net.request_stop()
        stops = []
        for _ in range(2):
            run.step()
            waits = len(run.recorder.waits)
            stops.append(run.net.should_stop())
            assert len(run.recorder.waits) == waits, "the host waits for the device"
        assert gather(stops) == [[False, True]] * 2
