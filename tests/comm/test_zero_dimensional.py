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
from training import WAYS, counted

from tritonddp import DistributedDataParallel
from tritonddp.kernels import launch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(2, interprets=True, views=True)
def test_weighted_gradients_are_rounded_once_after_the_factor(
    rank: int, view: bool, dtype: torch.dtype
) -> None:
    weights = (3, 4)  # whose factor is not a power of two, which every dtype has
    with recording() as recorder:
        ddp = wrapped(dtype, gradient_as_bucket_view=view)
        launches = launch.launches
        with counted(ddp) as found, ddp.weighted(weights[rank]):
            backward(ddp, gradients(dtype, rank))
        expected = rounded_once(dtype, weights, 16.0)
        assert_same_bits([p.grad.cpu() for p in ddp.parameters()], expected, "gradient")
        assert recorder.rounded == []
        assert found.unflattens == 1
        assert launch.launches - launches == 2  # one flattens, one scales


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


@pytest.mark.parametrize(
    "way",
    [
        *("copies", "hook", "views", "lazy views", "bf16 views"),
        pytest.param("int8", marks=pytest.mark.quick),
    ],
)
@ranks(2, interprets=True)
def test_no_operand_without_dimensions_loses_precision(way: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        options = {} if way == "hook" else {**WAYS[way], "check_finite": "raise"}
        with recording() as recorder:
            ddp = wrapped(dtype, bucket_cap_mb=0.001, **options)
            if way == "hook":
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
            play(ddp, dtype)
        assert recorder.rounded == [], dtype


@pytest.mark.parametrize("has_dense", [False, True])
@ranks(2, interprets=True)
def test_no_operand_of_sparse_gradients_loses_precision(rank: int, has_dense: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
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
