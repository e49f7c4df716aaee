"""Headers over NCCL: ranks that disagree, and gradients that are not finite.

On a GPU the host does not wait for the headers in the backward. It reads them in the next forward.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather
from nets import batch, dense
from training import raises_if, train_step
from worlds import CPU, NCCL_2, everywhere, in_worlds

from tritonddp import DistributedDataParallel


@in_worlds(CPU, NCCL_2)
def test_ranks_that_disagree_raise_in_the_next_backward_at_the_latest(
    device: torch.device,
) -> None:
    ddp = DistributedDataParallel(dense().to(device))
    train_step(ddp, batch(0).to(device), loss=torch.mean)
    loss = ddp(batch(1).to(device)).mean()
    weighted = ddp.weighted(2) if dist.get_rank() else contextlib.nullcontext()

    def two_backwards() -> None:
        with weighted:
            loss.backward()
        ddp(batch(2).to(device)).mean().backward()

    with pytest.raises(RuntimeError, match="rank 0: no weight; rank 1: weight 2") as raised:
        two_backwards()
    assert all("bucket 0" in text for text in gather(str(raised.value)))
    train_step(ddp, batch(3).to(device), loss=torch.mean)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])
    ddp.check_sync()


@pytest.mark.parametrize("way", [{}, {"reduce_dtype": torch.bfloat16}, {"compression": "int8"}])
@everywhere
def test_gradients_that_are_not_finite(device: torch.device, view: bool, way: dict) -> None:
    module = dense().to(device)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view, check_finite="raise", **way)
    last = dist.get_world_size() - 1
    for step in range(4):
        ddp.zero_grad()
        loss = ddp(batch(step).to(device)).mean()
        if step == 2 and dist.get_rank() == last:
            loss = loss + module[0].weight[3, 4] * torch.nan
        with raises_if(step == 2, FloatingPointError, f"'0.weight' .* on rank {last}"):
            loss.backward()
        if step != 2:
            assert all(param.grad.isfinite().all() for param in ddp.parameters())
