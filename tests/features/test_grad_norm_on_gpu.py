"""Norms of gradients from the sums of a GPU's kernels, interpreted."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from recording.device import recording
from torch import nn
from training import ways

from tritonddp import DistributedDataParallel
from tritonddp.features import grad_norm

WAYS = ways("copies", "views", "lazy", "lazy views", "bf16", "finite")


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(shape, dtype=dtype) for shape in [(40, 30), (17,), (5,), ()]
        )

    def forward(self, factor: float, *without: int) -> torch.Tensor:
        used = [each for at, each in enumerate(self.weights) if at not in without]
        return torch.stack([each.abs().square().sum() * factor for each in used]).sum()


def wrapped(dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    options = {"grad_norm": True, "bucket_cap_mb": 0.002, **options}
    return DistributedDataParallel(Net(dtype).to("cuda"), **options)


def expected(module: nn.Module) -> float:
    grads = [p.grad.abs().double().flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(grads).norm().item()


def is_right(ddp: DistributedDataParallel) -> None:
    found = ddp.grad_norm()
    assert found.item() == pytest.approx(expected(ddp.module), rel=1e-5)
    assert_same_on_all_ranks([found])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("way", WAYS)
@ranks(2, interprets=True)
def test_sums_of_the_kernels_are_the_norm(way: str, dtype: torch.dtype) -> None:
    with recording() as recorder:
        ddp, rank = wrapped(dtype, **WAYS[way]), dist.get_rank()
        for number in range(3):
            ddp.zero_grad(set_to_none=number == 1)
            ddp(1.0 + rank + number).backward()
            is_right(ddp)
        with mock.patch.object(grad_norm, "norms_of", side_effect=AssertionError("a pass")):
            before = ddp.grad_norm().item()
        ddp.clip_grad_norm_(before / 2)
        assert expected(ddp.module) == pytest.approx(before / 2, rel=1e-2)
        is_right(ddp)
        with ddp.weighted(1 + rank):
            ddp(1.0 + rank).backward()
        is_right(ddp)
        torch.cuda.synchronize()
    assert not recorder.races, recorder.report()


@pytest.mark.parametrize("way", ["copies", "views", "bf16"])
@ranks(2, interprets=True)
def test_what_no_rank_or_not_every_rank_has_used(way: str) -> None:
    with recording() as recorder:
        ddp, rank = wrapped(**WAYS[way]), dist.get_rank()
        for without in ((), (0,), (1,) if rank else (), (0, 2), ()):
            ddp(1.0 + rank).backward()
            is_right(ddp)
            ddp(1.0 + rank, *without).backward()  # what nobody uses keeps its gradient, and counts
            is_right(ddp)
            ddp.zero_grad(set_to_none=bool(without))
        torch.cuda.synchronize()
    assert not recorder.races, recorder.report()
