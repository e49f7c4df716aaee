"""What a steady step launches, sends, calls and waits for on a GPU.

Counted on the recorded device. The numbers may only be lowered.
"""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from device_step import step_calls
from distributed import ranks
from torch import nn

from benchmarks.models.architectures import ARCHITECTURES
from recording.programs import PROGRAMS, play, sound
from tritonddp import DistributedDataParallel
from tritonddp.buckets.assignment import BucketCaps


@dataclass(frozen=True)
class Step:
    """The counts of one step.

    Attributes:
        buckets: of the program.
        kernels: launches of the package's kernels, except those that write addresses: one for each
            bucket to pack it, one to unpack the last bucket, and one to unpack all others.
        collectives: of all kinds.
        operations: at most this many operations of torch on the device, called by the package.
        moves: at most this many launches that write addresses: none if gradients have not moved.
        uploads: at most this many copies to the device.
        readbacks: copies to the host.
        waits: where the host waits for work of this step.
        before: where it waits for work of the step before: for its headers, at the end of the
            backward.
    """

    buckets: int
    kernels: int
    collectives: int
    operations: int = 0
    moves: int = 0
    uploads: int = 0
    readbacks: int = 1
    waits: tuple[str, ...] = ()
    before: tuple[str, ...] = ("comm/reduction.py finish",)


_KERNELS = ("flatten", "unflatten", "quantize", "reduce_parts", "dequantize")
_FLAGS = ("comm/reduction.py _read_flags",)
STEADY = {
    "copies": Step(2, 4, 2, moves=2),
    "copies, zeroed in place": Step(2, 4, 2),
    "views": Step(2, 2, 2, moves=2),
    "views, zeroed in place": Step(2, 2, 2),
    "weights": Step(2, 4, 2, operations=6, moves=2),
    "weights, views": Step(2, 4, 2, operations=6, moves=4),
    "unused parameters": Step(2, 3, 2, operations=2, moves=1, readbacks=2, waits=_FLAGS, before=()),
    "unused parameters, views": Step(
        2, 2, 2, operations=2, moves=1, readbacks=2, waits=_FLAGS, before=()
    ),
    "no_sync": Step(2, 4, 2, moves=2),
    "bf16 wire": Step(2, 4, 2, moves=2),
    "bf16 wire, views": Step(2, 4, 2, moves=2),
    "int8": Step(4, 10, 6, moves=4),
    "lazy buckets": Step(2, 4, 2, operations=4, moves=2),
    "communication hook": Step(2, 4, 3, operations=21, moves=2),
    "communication hook, views": Step(2, 4, 3, operations=21, moves=4),
    "buffers": Step(2, 4, 3, operations=2, moves=2),
    # (Which buckets are left out depends on what the last headers say.)
    "left-out buckets": Step(2, 2, 1, moves=1, before=("reducer/reducer.py check_pending",)),
    "scalars": Step(2, 4, 2, operations=11, moves=2),
    "check_finite": Step(
        *(2, 4, 2),
        operations=23,
        moves=2,
        readbacks=2,
        waits=("features/check_finite.py on_reduced_all",),
        before=(),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(STEADY))
@ranks(2, interprets=True)
def test_a_steady_step_waits_for_the_last_headers_only_and_has_no_race(name: str) -> None:
    expected = STEADY[name]
    recorder = (played := play(PROGRAMS[name])).recorder
    assert not recorder.races, recorder.report()
    launches = recorder.launches
    operations = {each: n for each, n in launches.items() if each.startswith("aten::")}
    assert played.buckets == expected.buckets
    assert sum(launches[each] for each in _KERNELS) == expected.kernels, launches
    assert recorder.collectives.total() == expected.collectives, recorder.collectives
    assert sum(operations.values()) <= expected.operations, operations
    assert launches["addresses"] <= expected.moves
    assert launches["copy to the device"] <= expected.uploads
    assert launches["copy to the host"] == expected.readbacks
    # cudaHostAlloc may wait for the device.
    assert not recorder.pinned_allocations, "pinned memory that no free block serves"
    before = [wait for wait in recorder.waits if wait.age]
    assert tuple(wait.place for wait in before) == expected.before, before
    waits = tuple(wait.place for wait in recorder.waits if not wait.age)
    assert waits == expected.waits, recorder.waits
    assert all(wait.ahead for wait in before), "the device is kept waiting for the host"


@pytest.mark.parametrize("moves", [False, True], ids=["steady", "moved"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@ranks(2, interprets=True)
def test_a_bucket_and_the_rest_of_a_step_call_few_functions(views: bool, moves: bool) -> None:
    """From steps that differ only in the number of buckets. ``moved``: gradients have moved.

    The rest has two waits, and two launches that unflatten: see ``test_way_back.py``.
    """
    few, many = (
        step_calls(16, buckets, moves, gradient_as_bucket_view=views) for buckets in (2, 4)
    )
    of_package = (many.of_package.total() - few.of_package.total()) / 2
    of_others = (many.of_others.total() - few.of_others.total()) / 2
    assert of_package <= (8 if moves else 6), many.of_package
    assert of_others <= (24 if moves else 14), many.of_others
    assert few.of_package.total() - 2 * of_package <= 37, few.of_package


class Scaled(nn.Module):
    """A model with one of 4,096 elements of each parameter; the first parameter is used last."""

    def __init__(self, name: str) -> None:
        super().__init__()
        with torch.device("meta"):
            model = ARCHITECTURES[name]()
        sizes = [-(-param.numel() // 4096) for param in model.parameters()]
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for vector in self.vectors:
            x = x * vector.mean()
        return x


@pytest.mark.parametrize(
    ("name", "count"), [("gpt2_small", 14), ("resnet50", 7), ("llama3_8b_layer", 6)]
)
@ranks(2, interprets=True)
def test_the_default_caps_give_these_buckets(name: str, count: int) -> None:
    caps = BucketCaps.for_nccl()
    scaled = replace(caps, limits=tuple(limit // 4096 for limit in caps.limits))
    with sound() as recorder, mock.patch.object(BucketCaps, "for_nccl", return_value=scaled):
        net = DistributedDataParallel(Scaled(name).to("cuda"))
        x = torch.ones((), device="cuda")
        for _ in range(3):
            net.zero_grad()
            recorder.step_begins()
            net(x).backward()
        assert len(net.reducer.buckets) == count
        data = net._get_ddp_logging_data()
        assert data["bucket_cap_bytes"] == scaled.limits[-1]
        sizes = sorted(int(size) for size in data["bucket_sizes"].split(", "))
        assert sum(sizes) == 4 * sum(param.numel() for param in net.parameters())
        # Dynamo splits its graph by them.
        assert (net.bucket_bytes_cap, net.bucket_bytes_cap_default) == (scaled.limits[-1], True)
        assert recorder.collectives.total() == len(net.reducer.buckets), recorder.collectives
        assert recorder.launches["flatten"] == len(net.reducer.buckets)
