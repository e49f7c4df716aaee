"""``reduce_dtype``: what gradients travel in, what it costs and what it keeps."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, in_rings, ranks
from distributed import recorded_collectives as recorded
from modules import Kinds, Squares
from oracle import Alone, mean_over_ranks, one_per_rank, play
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from training import HEADER_BYTES, assert_gradients_alike, counted, train_step, wrap

from tritonddp import DistributedDataParallel
from tritonddp.coordination.counters import Counters

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Net(nn.Module):
    """Large, small, channels last and empty parameters, one tied, one used by rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(4, 70_000, bias=False)  # more than is cast at once
        self.out = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.out.weight
        self.some = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, rank: int) -> Tensor:
        x = self.conv(torch.randn(2, 2, 4, 4)).mean((2, 3))
        x = torch.tanh(self.wide(x)[:, :16].reshape(-1, 4) + self.wide.weight.square().mean())
        x = self.tied(torch.tanh(self.out(x)))
        if rank == 0:
            x = self.some(x)
        return x.square().mean() + self.empty.sum()


def magnitude(alone: Sequence[nn.Module]) -> list[Tensor | None]:
    """The mean over the ranks of the gradients' absolute values, counted as the mean itself."""
    absolute = copy.deepcopy(list(alone))
    for model in absolute:
        for window in getattr(model, "windows", ()):
            window.sums = {param: total.abs() for param, total in window.sums.items()}
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad.abs()
    return mean_over_ranks(absolute)


def assert_close_on_the_wire(
    ddp: nn.Module, alone: Sequence[Alone], dtype: torch.dtype, what: str
) -> None:
    """Each element is as exact as a cast per rank and a sum of ranks in ``dtype`` can be."""
    ranks = len(alone)
    rows = zip(ddp.named_parameters(), mean_over_ranks(alone), magnitude(alone), strict=True)
    for (name, param), mean, size in rows:
        where = f"{what}: {name}"
        assert (param.grad is None) == (mean is None), where
        if mean is None or size is None:
            continue
        assert param.grad.dtype == param.dtype, where
        info = torch.finfo(dtype)
        # Below the normal numbers, too, in the unit of weights, which is 16 at first.
        least = 16 * info.smallest_normal * info.eps
        # 1% for the second order, and fp32's own rounding.
        bound = 1.01 * ranks * (info.eps / 2 * size + least)
        wrong = (param.grad - mean).abs() > bound
        assert not wrong.any(), f"{where}: {param.grad[wrong][:3]}, should be {mean[wrong][:3]}"
    assert_gradients_alike(ddp, what)


@HALVES
@ranks(2, 3)
def test_the_mean_to_the_rounding_of_the_wire_and_alike_on_all_ranks(dtype: torch.dtype) -> None:
    module = Net()
    for view in (False, True):
        ddp = wrap(copy.deepcopy(module), view, reduce_dtype=dtype, bucket_cap_mb=0.5)
        alone = one_per_rank(module)
        for step in range(3):

            def accumulated(net: Any, rank: int, step: int = step) -> None:
                net.zero_grad()
                if step == 1:
                    with net.no_sync():
                        net(1 - rank).backward()
                net(rank).backward()

            play(accumulated, ddp, alone, step)
            assert_close_on_the_wire(ddp, alone, dtype, f"view={view}, step {step}")
        assert len({bucket.flat.data.data_ptr() for bucket in ddp.reducer.buckets}) > 1
        assert {bucket.flat.data.dtype for bucket in ddp.reducer.buckets} == {dtype}
        play(weighted, ddp, alone, 3)
        assert_close_on_the_wire(ddp, alone, dtype, f"view={view}, weighted by {len(alone)}")


def weighted(net: Any, rank: int) -> None:
    net.zero_grad()
    for items in (3.0, 2.0 * rank):
        with net.no_sync(), net.weighted(items):
            net(rank).backward()
    with net.weighted(1 + rank):
        net(rank).backward()


def step(ddp: nn.Module) -> None:
    train_step(ddp, loss=torch.sum)


@ranks(3, views=True)
def test_half_the_bytes_at_one_launch_each_way_a_bucket(view: bool) -> None:
    ddp = in_rings(Squares(*[64] * 100), reduce_dtype=torch.bfloat16, gradient_as_bucket_view=view)
    for _ in range(2):
        step(ddp)
    with recorded() as calls, counted(ddp) as found:
        step(ddp)
    assert calls.names == ["all_reduce"]
    nbytes = 2 * (100 * (64 + 1) + 3 * HEADER_BYTES)
    assert calls[0][1].nbytes == nbytes
    assert ddp._ddp_state.config.caps.limits[:3] == (2**20, 2**20, 2**21)
    assert found == Counters(
        reductions=1,
        flattens=1,
        unflattens=1,
        collectives=1,
        wire_bytes=nbytes,
        sent_bytes=-(-2 * 2 * nbytes // 3),
    )


@ranks(2)
def test_gradients_are_scaled_in_full_precision_before_the_cast() -> None:
    ddp = DistributedDataParallel(Squares(3), reduce_dtype=torch.float16)
    factor = 49_984.0  # a gradient of 99,968: half of it is within fp16
    for rank in (0, 1):
        ddp.zero_grad()
        # Only one rank has one, so that the sum is within fp16 too.
        (ddp(factor) * float(rank == dist.get_rank())).backward()
        assert ddp.module.params[0].grad.tolist() == [factor] * 3
    train_step(ddp, factor, loss=torch.sum)
    assert ddp.module.params[0].grad.isinf().all(), "not clamped: a GradScaler has to see it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ranks(2)
def test_dense_real_gradients_travel_in_it_and_others_in_their_own(
    rank: int, dtype: torch.dtype
) -> None:
    ddp = DistributedDataParallel(Kinds(), reduce_dtype=dtype)
    rows = torch.tensor([rank])
    for _ in range(3):
        train_step(ddp, rows, 1 / 3 + rank, table=1.0, loss=torch.sum)
    wire = {name: bucket.flat.data.dtype for bucket in ddp.reducer.buckets for name in bucket.names}
    assert wire == {
        "single": dtype,
        "half_": dtype,
        "double_": dtype,
        "complex_": torch.float32,  # real and imaginary parts
        "table.weight": torch.float32,
    }
    module = ddp.module
    assert module.double_.grad.dtype == torch.float64
    assert module.table.weight.grad.is_sparse
    terms = [torch.tensor(each / 2, dtype=torch.float64) for each in (1 / 3, 4 / 3)]
    cast = sum(term.to(dtype) for term in terms)
    assert_same_bits(module.double_.grad, cast.double().expand(5), "fp64")
    rounded = [(term.to(torch.float16) * 2).float() / 2 for term in terms]
    if dtype == torch.float32:  # of parameters in fp16: no rounding after the gradient's own
        assert_same_bits(module.half_.grad, sum(rounded).half().expand(5), "fp16")
    torch.testing.assert_close(module.complex_.grad, torch.full((5,), 5 / 6 + 5j / 6))


@ranks(2)
def test_with_mixed_precision() -> None:
    def wire(reduce_dtype: Any, config: _MixedPrecision) -> torch.dtype:
        ddp = DistributedDataParallel(Squares(3), reduce_dtype=reduce_dtype, mixed_precision=config)
        return ddp.reducer.buckets[0].flat.data.dtype

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert wire(fp32, _MixedPrecision(bf16)) == fp32
    assert wire(fp16, _MixedPrecision(reduce_dtype=fp16)) == fp16
    assert wire(None, _MixedPrecision(bf16)) == bf16
    with pytest.raises(ValueError, match=r"bfloat16 contradicts mixed_precision.* torch.float16"):
        wire(bf16, _MixedPrecision(reduce_dtype=fp16))
