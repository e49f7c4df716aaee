"""Quantized gradients over NCCL have the bits of the twins on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits
from hosts import emulated_hosts
from modules import Given
from nets import gradients
from quantized_ranks import Simulated
from torch import Tensor
from training import drawn
from two_levels import SHAPES as SHAPES_OF_SHARES
from two_levels import Twins, replayed
from two_levels import given as given_to_shares
from worlds import NCCL_2, NCCL_4, VIEW, in_worlds

from tritonddp import DistributedDataParallel
from tritonddp.buckets.wire_formats import QuantizedInterHost

# Large and small, exact and quantized, with and without a partly filled last block.
LARGE = (64, 80) if "TRITON_INTERPRET" in os.environ else (512, 640)
SHAPES = [LARGE, (640,), (70, 33), (300,), (64, 64), (1, 5), (1025, 3)]


def given(rank: int, step: int) -> list[Tensor | None]:
    left_out = ({4, 2} if rank == 0 else {4}) if step % 2 else {}  # number 4 on no rank
    grads = [drawn(*shape, step=10 * step + n, rank=rank) for n, shape in enumerate(SHAPES)]
    return [None if n in left_out else grad for n, grad in enumerate(grads)]


def backward(ddp: DistributedDataParallel, grads: list[Tensor | None]) -> None:
    ddp.zero_grad()
    ddp(*(None if each is None else each.to(ddp.device) for each in grads)).backward()


@in_worlds(NCCL_2)
def test_gradients_have_the_bits_of_the_twins(device: torch.device) -> None:
    """On the CPU: ``tests/comm/test_compression.py``."""
    module = Given(*SHAPES)
    large = [
        name for name, each in module.named_parameters() if each.dim() > 1 and each.numel() >= 1024
    ]
    simulated = Simulated(module.named_parameters(), large, world_size=2)
    ddp = DistributedDataParallel(module.to(device), compression="int8", bucket_cap_mb=0.02)
    for step in range(4):
        backward(ddp, given(dist.get_rank(), step))
        expected = simulated.means([given(rank, step) for rank in range(2)])
        assert_same_bits(gradients(ddp), expected, f"step {step}, slot")
    assert sum(bucket.quantization is not None for bucket in ddp.reducer.buckets) > 1
    assert not ddp._ddp_state.core.manager.has_moved, "residuals have moved between the ranks"


@VIEW
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@in_worlds(NCCL_4)
def test_between_two_hosts_gradients_have_the_bits_of_the_twins(
    device: torch.device, dtype: torch.dtype, view: bool
) -> None:
    """Also with ``reduce_dtype``, in which a host sums."""
    twins = Twins(2, dtype)
    with emulated_hosts(2):
        ddp = DistributedDataParallel(
            Given(*SHAPES_OF_SHARES).to(device),
            compression="int8",
            reduce_dtype=None if dtype is torch.float32 else dtype,
            bucket_cap_mb=0.02,
            gradient_as_bucket_view=view,
        )
        for step in range(5):
            backward(ddp, given_to_shares(dist.get_rank(), step))
            expected = twins.reduce([given_to_shares(each, step) for each in range(4)])
            assert_same_bits(gradients(ddp), expected, f"step {step}, slot")
    found = [isinstance(bucket.wire, QuantizedInterHost) for bucket in ddp.reducer.buckets]
    assert sum(found) > 1


@in_worlds(NCCL_4)
def test_replays_between_two_hosts_lose_nothing_and_add_nothing_twice(device: torch.device) -> None:
    """Captured after one step, in which communicators and tables of the shares were made.

    The residuals of that step are those of other ranks, whose steps are captured.
    """
    with emulated_hosts(2):
        due, kept = replayed(device)
    assert due.abs().max() > 1e-4
    assert (due - kept).abs().max() < 1e-6
