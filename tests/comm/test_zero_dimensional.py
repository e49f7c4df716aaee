"""Factors that are on a GPU, and must not be rounded to the dtype of what they multiply."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from modules import Given
from recording.device import recording
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tritonddp import DistributedDataParallel
from tritonddp.kernels import launch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
SHAPES = [(40, 30), (17,), ()]


def gradients(dtype: torch.dtype, rank: int, step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES]


def backward(ddp: Any, given: list[Tensor]) -> None:
    loss = ddp(*(each.to("cuda") for each in given))
    (loss.real if loss.is_complex() else loss).backward()


def wrapped(dtype: torch.dtype, **options: Any) -> Any:
    return DistributedDataParallel(Given(*SHAPES, dtype=dtype).to("cuda"), **options)


def rounded_once(dtype: torch.dtype, weights: tuple[float, float], unit: float) -> list[Tensor]:
    """The weighted means, rounded to ``dtype`` where they must be: on the wire and at the end."""
    real = torch.float64 if dtype is torch.float64 else torch.float32
    wide = dtype if dtype.is_complex else real

    def scaled(tensor: Tensor, factor: float) -> Tensor:
        rounded = torch.tensor([factor], dtype=torch.float64).to(real).item()
        return (tensor.to(wide) * rounded).to(dtype)

    means = []
    for mine in zip(*(gradients(dtype, rank) for rank in range(2)), strict=True):
        sent = [scaled(each, weight / 2 / unit) for each, weight in zip(mine, weights, strict=True)]
        total = (sent[0].to(wide) + sent[1].to(wide)).to(dtype)
        means.append(scaled(total, 2 * unit / sum(weights)))
    return means


# Their factor is no power of two, which every dtype would have.
WEIGHTS = (3, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@VIEW
@ranks(2, interprets=True)
def test_weighted_gradients_are_rounded_once_after_the_factor(
    view: bool, dtype: torch.dtype
) -> None:
    rank = dist.get_rank()
    with recording() as recorder:
        ddp = wrapped(dtype, gradient_as_bucket_view=view)
        counts, launches = ddp.reducer.counters.unflattens, launch.launches
        with ddp.weighted(WEIGHTS[rank]):
            backward(ddp, gradients(dtype, rank))
        expected = rounded_once(dtype, WEIGHTS, 16.0)
        for number, (param, mean) in enumerate(zip(ddp.parameters(), expected, strict=True)):
            assert_same_bits(param.grad.cpu(), mean, f"gradient {number}")
        assert recorder.rounded == []
        assert ddp.reducer.counters.unflattens - counts == 1
        assert launch.launches - launches == 2  # one flattens, one scales


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hook": {},
    "view": {"gradient_as_bucket_view": True},
    "lazy": {"gradient_as_bucket_view": True, "lazy_bucket_allocation": True},
    "finite": {"gradient_as_bucket_view": True, "check_finite": "raise"},
    "reduce_dtype": {"reduce_dtype": torch.bfloat16, "check_finite": "raise"},
    "int8": {"compression": "int8", "check_finite": "raise"},
}


def play(ddp: Any, dtype: torch.dtype) -> None:
    """Reduce in every way that has a factor."""
    rank = dist.get_rank()
    step = 0

    def train(*contexts: AbstractContextManager[Any], set_to_none: bool = False) -> None:
        nonlocal step
        ddp.zero_grad(set_to_none=set_to_none)
        for context in contexts:
            step += 1
            with context:
                backward(ddp, gradients(dtype, rank, step))

    train(nullcontext())
    train(ddp.weighted(3 + 2 * rank))
    train(ddp.weighted(3 + 2 * rank, reduction="sum"), set_to_none=True)
    for reduction in ("mean", "sum"):
        with ddp.no_sync():
            train(ddp.weighted(7, reduction=reduction), ddp.weighted(2, reduction=reduction))
        with ddp.weighted(3 + rank, reduction=reduction):
            backward(ddp, gradients(dtype, rank, 90))
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + 2 * rank):
            train(nullcontext())
    with ddp.no_sync():
        train(nullcontext())
    ddp.reduce_gradients()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "way", [pytest.param(each, marks=[pytest.mark.quick] * (each == "int8")) for each in WAYS]
)
@ranks(2, interprets=True)
def test_no_operand_without_dimensions_loses_precision(way: str, dtype: torch.dtype) -> None:
    with recording() as recorder:
        ddp = wrapped(dtype, bucket_cap_mb=0.001, **WAYS[way])
        if way == "hook":
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        play(ddp, dtype)
    assert recorder.rounded == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("has_dense", [False, True])
@ranks(2, interprets=True)
def test_no_operand_of_sparse_gradients_loses_precision(
    has_dense: bool, dtype: torch.dtype
) -> None:
    rank = dist.get_rank()
    with recording() as recorder:
        table = nn.Embedding(20, 6, sparse=True, dtype=dtype).to("cuda")
        ddp = DistributedDataParallel(table)
        with ddp.weighted(3 + rank):
            loss = ddp(torch.tensor([1, 4, 4 + rank]).to("cuda")).sum()
            (loss + table.weight.sum() if has_dense and rank else loss).backward()
        assert recorder.rounded == []
        assert table.weight.grad.is_sparse is not has_dense
        row = table.weight.grad.to_dense()[1].cpu()
    mean = 16 * 2 / 7 * (3 / 32 + (2 if has_dense else 1) * 4 / 32)
    torch.testing.assert_close(row, torch.full_like(row, mean))
