"""``check_sync()`` names the values that differ between ranks, unless they differ by design."""

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from modules import linears
from torch import Tensor, nn
from training import breaking_off

from tritonddp import DistributedDataParallel
from tritonddp.diagnostics import check_sync
from tritonddp.diagnostics.checksum import checksums


class Net(nn.Module):
    """Running statistics, other buffers of several dtypes, and a layer that may be unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0))
        self.packed = torch.zeros(4, dtype=torch.uint8)
        self.register_buffer("fp4", self.packed.view(torch.float4_e2m1fn_x2))

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = self.layers[0](self.norm(x) * self.scale)
        return self.layers[1](x) if both else x


def step(ddp: nn.Module) -> None:
    inputs = torch.randn(5, 4) + dist.get_rank()
    ddp(inputs).square().mean().backward()


def stepped() -> DistributedDataParallel:
    ddp = DistributedDataParallel(Net())
    step(ddp)
    return ddp


def error_of(check: Callable[[], object]) -> str:
    """The error of a check without the number of this rank, which is the same on all ranks."""
    start = f"rank {dist.get_rank()}, "
    with pytest.raises(RuntimeError, match=f"^{start}step ") as raised:
        check()
    texts = gather(str(raised.value).removeprefix(start))
    assert len({*texts}) == 1
    return texts[0]


# Values that differ


@ranks(3)
def test_values_that_differ_on_one_rank_are_named(rank: int) -> None:
    ddp = stepped()
    ddp.check_sync()
    net = ddp.module
    if rank == 1:
        net.layers[1].weight.detach()[2, 3] += 1e-6
    text = error_of(ddp.check_sync)
    counts = "1 of 8 parameters, 0 of 5 buffers, 0 of 8 gradients"
    assert f"check_sync(): values differ between ranks ({counts}):" in text
    assert "Parameters stay identical" in text
    assert "Buffers" not in text
    if rank == 1:
        net.mask.logical_not_()
        net.count += 1
        net.packed[2] = 7
        net.layers[0].weight.grad[0, 0] = torch.nan
        net.layers[0].bias.grad = None
        net.layers[2].weight.grad = torch.zeros(4, 4)
    text = error_of(ddp.check_sync)
    assert "(1 of 8 parameters, 3 of 5 buffers, 3 of 8 gradients):" in text
    for line in (
        r"parameter 'layers.1.weight' \(4, 4\) torch.float32: rank 1 has .*; ranks 0 and 2 have",
        r"buffer 'mask' \(2,\) torch.bool: rank 1 has norm 1 .*; ranks 0 and 2 have norm 1 ",
        r"buffer 'fp4' \(4,\) torch.float4_e2m1fn_x2: rank 1 has norm .*; .* have norm 0",
        r"buffer 'count' \(\) torch.int64: rank 1 has norm 4 .*; ranks 0 and 2 have norm 3 ",
        r"gradient 'layers.0.weight' .*rank 1 has norm nan",
        r"gradient 'layers.0.bias' .*rank 1 has none",
        r"gradient 'layers.2.weight' .*rank 1 has norm 0 .*; ranks 0 and 2 have none",
    ):
        assert re.search(line, text), (line, text)
    for param in ddp.parameters():
        param.detach().fill_(-0.0 if rank == 0 else 0.0)
    text = error_of(lambda: ddp.check_sync(gradients=False, buffers=False))
    assert "(8 of 8 parameters):" in text
    step(ddp)  # training continues


@ranks(3)
def test_the_first_of_many_tensors_and_contents_are_listed_and_others_counted(rank: int) -> None:
    ddp = DistributedDataParallel(linears(*[2] * 8))
    for param in ddp.parameters():
        param.detach().add_(rank)
    with mock.patch.object(check_sync, "_CONTENTS", 1):
        text = error_of(ddp.check_sync)
    assert text.count("\n  parameter ") == 10
    assert "... and 4 more" in text
    assert "2 more ranks have 2 other values" in text


# Values that may differ


@ranks(3)
def test_values_that_differ_by_design_are_accepted(rank: int) -> None:
    net = Net()
    net._ddp_params_and_buffers_to_ignore = ["layers.2.weight", "count"]
    ddp = DistributedDataParallel(net)
    net.layers[0].weight.grad = torch.full((4, 4), float(rank))
    net.layers[2].weight.detach().fill_(rank)
    net.count.fill_(rank)
    ddp.check_sync()  # no gradient was reduced yet
    net.zero_grad()
    step(ddp)  # running statistics are rank-local until the next forward
    ddp.check_sync()
    assert len({str(each) for each in gather(net.norm.running_mean.tolist())}) == 3
    assert "buffer 'norm.running_mean'" in error_of(lambda: ddp.check_sync(buffers=True))
    with ddp.no_sync():  # some ranks accumulate more than others
        loss = ddp(torch.randn(5, 4), both=False).square().mean()
        if rank == 1:
            loss.backward()
    ddp.check_sync()
    text = error_of(lambda: ddp.check_sync(gradients=True))
    assert "gradient 'layers.0.weight'" in text
    assert "layers.1" not in text
    assert "rank 1 has norm" in text
    step(ddp)
    ddp.check_sync(gradients=True)
    net.layers[0].requires_grad_(False)
    net.layers[0].weight.grad.fill_(rank)
    ddp.check_sync()


@ranks(2)
def test_synchronized_statistics_are_compared_where_the_layer_spans_the_group(rank: int) -> None:
    """No training: SyncBatchNorm has no forward on the CPU."""
    ddp = DistributedDataParallel(Net())
    ddp.module.norm = nn.SyncBatchNorm(4)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    ddp.module.norm.running_var.add_(rank)
    assert "buffer 'norm.running_var'" in error_of(ddp.check_sync)
    ddp.module.norm.process_group = alone
    ddp.check_sync()


def test_an_unregistered_group_spans_only_itself() -> None:
    group, other = dist.ProcessGroup(0, 1), dist.ProcessGroup(0, 1)
    assert check_sync._spans(group, group)
    assert not check_sync._spans(other, group)


# Permitted times of the call


@ranks(2)
def test_it_is_refused_in_a_backward_or_join_and_recovers_a_failed_backward(rank: int) -> None:
    ddp = stepped()
    refused = []

    def check(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"^rank \d, step 2: gradients cannot be compared"):
            ddp.check_sync()
        refused.append(True)

    handle = ddp.module.layers[1].weight.register_hook(check)
    step(ddp)
    handle.remove()
    assert refused
    with ddp.join():
        step(ddp)
        with pytest.raises(RuntimeError, match=r"step 3: check_sync\(\) was called inside join"):
            ddp.check_sync()

    with breaking_off(ddp.module.layers[0].weight, rank == 1):
        step(ddp)
    ddp.check_sync(gradients=False)
    with pytest.raises(TypeError, match="buffers should be True, False or None, got 'all'"):
        ddp.check_sync(buffers="all")


# Checksums of the bits of tensors


def test_each_element_and_its_place_change_the_checksum() -> None:
    for dtype in torch.float8_e4m3fn, torch.complex64:
        values = torch.arange(1, 13).to(dtype).view(3, 4)
        different = [values, values[:, [1, 0, 2, 3]]]
        for number in range(12):
            different.append(values.clone())
            different[-1].view(-1)[number] = 0
        assert len({*checksums(different)}) == 14


def test_shape_dtype_and_layout_count_but_strides_and_the_order_of_rows_do_not() -> None:
    tensor = torch.zeros(2, 3)
    different = [None, tensor, tensor.view(3, 2), tensor.to_sparse(), tensor.view(torch.int32)]
    different += [torch.zeros(0), torch.zeros(0, 3)]
    assert len({*checksums(different)}) == len(different)

    def table(rows: list[int], values: list[list[float]]) -> Tensor:
        return torch.sparse_coo_tensor([rows], torch.tensor(values), (5, 2), check_invariants=True)

    turned, rows = torch.arange(20.0).view(4, 5), table([1, 3], [[1.0, 1], [1, 1]])
    for one, other in (
        (turned.t().contiguous().t(), turned),
        (torch.tensor(1 + 2j).conj(), torch.tensor(1 - 2j)),
        (rows, table([3, 1, 1], [[1.0, 1], [0.5, 0], [0.5, 1]])),
    ):
        assert len({*checksums([one, other])}) == 1
    assert len({*checksums([rows, table([1, 4], [[1.0, 1], [1, 1]])])}) == 2
