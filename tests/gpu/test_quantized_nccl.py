"""Quantized gradients over NCCL have the bits of the twins on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits
from modules import Given
from nets import gradients
from on_hosts import on_hosts
from quantized_ranks import Simulated
from torch import Tensor
from training import drawn
from worlds import NCCL_2, NCCL_4, in_worlds

from tritonddp import DistributedDataParallel
from tritonddp.buckets.wire_formats import QuantizedInterHost

# Large and small, exact and quantized, with and without a partly filled last block.
LARGE = (64, 80) if "TRITON_INTERPRET" in os.environ else (512, 640)
SHAPES = [LARGE, (640,), (70, 33), (300,), (64, 64), (1, 5), (1025, 3)]


def given(rank: int, step: int) -> list[Tensor | None]:
    """The first step leaves no residuals. In odd steps some are missing, number 4 on all ranks."""
    if not step:
        return [torch.zeros(shape) for shape in SHAPES]
    left_out = ({4, 2}, {4}, {4, 0}, {4})[rank] if step % 2 else {}
    grads = [drawn(*shape, step=10 * step + n, rank=rank) for n, shape in enumerate(SHAPES)]
    return [None if n in left_out else grad for n, grad in enumerate(grads)]


def backward(ddp: DistributedDataParallel, grads: list[Tensor | None]) -> None:
    ddp.zero_grad()
    ddp(*(None if each is None else each.to(ddp.device) for each in grads)).backward()


def simulated() -> Simulated:
    named = [*Given(*SHAPES).named_parameters()]
    large = [name for name, each in named if each.dim() > 1 and each.numel() >= 1024]
    return Simulated(named, large, world_size=2)


@in_worlds(NCCL_2)
def test_gradients_have_the_bits_of_the_twins(device: torch.device) -> None:
    """On the CPU: ``tests/comm/test_compression.py``."""
    twins = simulated()
    ddp = DistributedDataParallel(Given(*SHAPES).to(device), compression="int8", bucket_cap_mb=0.02)
    for step in range(4):
        backward(ddp, given(dist.get_rank(), step))
        expected = twins.means([given(rank, step) for rank in range(2)])
        assert_same_bits(gradients(ddp), expected, f"step {step}, slot")
    assert sum(bucket.quantization is not None for bucket in ddp.reducer.buckets) > 1


def of_host(ranks: Sequence[int], step: int, dtype: torch.dtype) -> list[Tensor | None]:
    """The mean of a host, which sums in ``dtype``."""
    found: list[Tensor | None] = []
    for grads in zip(*(given(rank, step) for rank in ranks), strict=True):
        there = [(each / len(ranks)).to(dtype) for each in grads if each is not None]
        found.append(sum(there[1:], there[0]).float() if there else None)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@in_worlds(NCCL_4)
def test_between_two_hosts_gradients_have_the_bits_of_the_twins(
    device: torch.device, dtype: torch.dtype
) -> None:
    """The ranks of a host sum in ``reduce_dtype``."""
    twins = simulated()
    with on_hosts(2):
        ddp = DistributedDataParallel(
            Given(*SHAPES).to(device),
            compression="int8",
            reduce_dtype=None if dtype is torch.float32 else dtype,
            bucket_cap_mb=0.02,
        )
        for step in range(5):
            backward(ddp, given(dist.get_rank(), step))
            means = twins.means([of_host(ranks, step, dtype) for ranks in ((0, 1), (2, 3))])
            expected = [None if each is None else each.to(dtype).float() for each in means]
            assert_same_bits(gradients(ddp), expected, f"step {step}, slot")
    found = [isinstance(bucket.wire, QuantizedInterHost) for bucket in ddp.reducer.buckets]
    assert sum(found) > 1
