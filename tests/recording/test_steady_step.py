"""What a step of each kind launches, sends and waits for on a GPU, once it is settled.

Counted on the recorded device. The numbers may only be lowered.
"""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from distributed import ranks
from torch import nn

from benchmarks.models.architectures import ARCHITECTURES
from recording.device import recording
from recording.programs import PROGRAMS, play
from tritonddp import DistributedDataParallel
from tritonddp.buckets.assignment import BucketCaps


@dataclass(frozen=True)
class Step:
    """Of a program with ``buckets`` buckets.

    Attributes:
        kernels: launches of the package's kernels, without those of ``moves``: one a bucket, and
            one each for the way back of the last bucket and of all the others.
        moves: launches that say where gradients lie now, at most: none where they lie where they
            lay.
        before: likewise in the step before. (At the end of its backward it waits for the headers of
            the last one, if they are not there.)
    """

    buckets: int
    kernels: int
    collectives: int  # of all kinds
    operations: int = 0  # of torch, on the device, that the package calls, at most
    moves: int = 0
    uploads: int = 0  # copies to the device, at most
    readbacks: int = 1  # copies to the host
    waits: tuple[str, ...] = ()  # of the host for what the device was given in this step: where
    before: tuple[str, ...] = ("comm/reduction.py finish",)


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
    kernels = {each: n for each, n in launches.items() if each in _KERNELS}
    operations = {each: n for each, n in launches.items() if each.startswith("aten::")}
    assert played.buckets == expected.buckets
    assert sum(kernels.values()) == expected.kernels, kernels
    assert recorder.collectives.total() == expected.collectives, recorder.collectives
    assert sum(operations.values()) <= expected.operations, operations
    assert launches["addresses"] <= expected.moves
    assert launches["copy to the device"] <= expected.uploads
    assert launches["copy to the host"] == expected.readbacks
    # By cudaHostAlloc, which may wait for the device.
    assert not recorder.pinned_allocations, "pinned memory that no free block serves"
    waits = tuple(each.place for each in recorder.waits if not each.age)
    assert waits == expected.waits, recorder.waits
    before = [each for each in recorder.waits if each.age]
    assert tuple(each.place for each in before) == expected.before, before
    assert all(each.ahead for each in before), "the device is kept waiting for the host"


_KERNELS = ("flatten", "unflatten", "quantize", "reduce_parts", "dequantize")


class Scaled(nn.Module):
    """The parameters of a model with one of 4,096 elements each; the first one is used last."""

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
def test_by_default_a_step_sends_these_buckets(name: str, count: int) -> None:
    caps = BucketCaps.for_nccl()
    scaled = replace(caps, limits=tuple(limit // 4096 for limit in caps.limits))
    with recording() as recorder, mock.patch.object(BucketCaps, "for_nccl", return_value=scaled):
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
        # By these dynamo splits the graph.
        assert (net.bucket_bytes_cap, net.bucket_bytes_cap_default) == (scaled.limits[-1], True)
        assert recorder.collectives.total() == len(net.reducer.buckets), recorder.collectives
        assert recorder.launches["flatten"] == len(net.reducer.buckets)
        assert not recorder.races, recorder.report()
        torch.cuda.synchronize()
