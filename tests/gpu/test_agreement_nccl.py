"""Headers over NCCL: changed parameters, and ranks that disagree.

On a GPU the host does not wait for the headers in the backward. It reads them at the next forward,
or at once if parameters were added.
"""

from __future__ import annotations

import contextlib
import copy
import re

import nets
import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather
from torch import Tensor, nn
from training import drawn, means, raises_if, train_step
from worlds import CARDS, CPU, NCCL_2, everywhere, in_worlds

from tritonddp import DistributedDataParallel


class Mixed(nn.Module):
    """Layers in fp32, and one that may have another dtype."""

    def __init__(self, last: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.to(last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).to(self.last.weight.dtype)).float()


def batch(device: torch.device, step: int) -> Tensor:
    return drawn(4, 8, step=step).to(device)


def assert_step(ddp: DistributedDataParallel, step: int) -> None:
    """Gradients are the means of those that copies of the module have on each rank."""
    alone = copy.deepcopy(ddp.module)
    for net in (ddp, alone):
        train_step(net, batch(ddp.device, step), loss=torch.mean)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])
    for grad, mean in zip(nets.gradients(ddp), means(nets.gradients(alone)), strict=True):
        tolerance = 1e-5 if mean is None or mean.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(grad, mean, rtol=tolerance, atol=1e-4, check_dtype=False)


@in_worlds(CPU, *CARDS)
def test_check_sync_finds_what_differs_and_only_that(device: torch.device) -> None:
    ddp = DistributedDataParallel(Mixed(torch.bfloat16).to(device))
    assert_step(ddp, 0)
    ddp.check_sync(gradients=True)
    if dist.get_world_size() == 1:
        return
    if dist.get_rank() == 1:
        ddp.module.last.weight.detach()[3, 4] *= -1
        ddp.module.first.bias.grad = None
    with pytest.raises(RuntimeError, match=r"1 of 6 parameters, 1 of 6 gradients") as raised:
        ddp.check_sync()
    assert "parameter 'last.weight' (8, 8) torch.bfloat16: rank 0 has norm" in str(raised.value)
    assert re.search("gradient 'first.bias' .*; rank 1 has none", str(raised.value))


@everywhere
def test_parameters_added_later(device: torch.device, view: bool) -> None:
    ddp = DistributedDataParallel(Mixed().to(device), gradient_as_bucket_view=view)
    assert_step(ddp, 0)
    torch.manual_seed(0)
    ddp.module.last = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    ddp.module.last.weight = ddp.module.last[0].weight  # type: ignore[assignment]
    for step in range(1, 4):
        assert_step(ddp, step)


@in_worlds(CPU, NCCL_2)
def test_ranks_that_disagree_raise_in_the_next_backward_at_the_latest(
    device: torch.device,
) -> None:
    ddp = DistributedDataParallel(Mixed().to(device))
    assert_step(ddp, 0)
    loss = ddp(batch(device, 1)).mean()
    weighted = ddp.weighted(2) if dist.get_rank() else contextlib.nullcontext()

    def two_backwards() -> None:
        with weighted:
            loss.backward()
        ddp(batch(device, 2)).mean().backward()

    with pytest.raises(RuntimeError, match="rank 0: no weight; rank 1: weight 2") as raised:
        two_backwards()
    assert all("bucket 0" in text for text in gather(str(raised.value)))
    assert_step(ddp, 3)


@pytest.mark.parametrize("way", [{}, {"reduce_dtype": torch.bfloat16}, {"compression": "int8"}])
@everywhere
def test_gradients_that_are_not_finite(device: torch.device, view: bool, way: dict) -> None:
    ddp = DistributedDataParallel(
        Mixed(torch.float16).to(device), gradient_as_bucket_view=view, check_finite="raise", **way
    )
    last = dist.get_world_size() - 1
    for step in range(4):
        ddp.zero_grad()
        loss = ddp(batch(device, step)).mean()
        if step == 2 and dist.get_rank() == last:
            loss = loss + ddp.module.first.weight[3, 4] * torch.nan
        with raises_if(step == 2, FloatingPointError, f"'first.weight' .* on rank {last}"):
            loss.backward()
        if step != 2:
            grads = [param.grad for param in ddp.parameters() if param.grad is not None]
            assert all(grad.isfinite().all() for grad in grads)
