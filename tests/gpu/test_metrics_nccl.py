"""What rides beside the gradients, over NCCL: norms, times, and buffers."""

from __future__ import annotations

import contextlib
import copy
import time

import pytest
import torch
import torch.distributed as dist
from clock import time_of_test
from distributed import assert_same_on_all_ranks, gather
from nets import WIDTH, batch
from test_metrics import PARTS, net, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from worlds import CARDS, CPU, device_of_stock, everywhere, in_worlds, is_recorded

from tritonddp import DistributedDataParallel
from tritonddp.features.metrics import EVERY

STEPS = 12


@pytest.mark.parametrize("part", PARTS)
@in_worlds(CPU, *CARDS)
def test_the_slow_rank_is_named_and_its_part_is_the_longest(
    device: torch.device, part: str
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(net().to(device), metrics=True)
    late = 0.06 * (rank == size - 1)
    # A CPU may be busy with other work; kernels of a card take what they take.
    with time_of_test() if device.type == "cpu" else contextlib.nullcontext(time) as clock:
        train(ddp, EVERY, lambda _: clock.sleep(0.02))
        found = train(ddp, 2 * EVERY + 1, lambda now: clock.sleep(0.02 + late * (now == part)))[-1]
    parts = sum(found[f"{each}_ms"] for each in ("input", "forward", "backward", "exposed"))
    # Each of the five is rounded to a microsecond on each rank, and again over the ranks.
    assert found["step_ms"] == pytest.approx(parts, abs=5 * 0.001)
    assert gather(found) == [found] * size
    # While one rank waits in a kernel of NCCL, the other's kernels have half of the card.
    if is_recorded(device) or (device.type == "cuda" and torch.cuda.device_count() < size):
        return
    assert found["step_ms"] > 80  # even steps: 60
    assert found["slowest_rank"] == size - 1, found
    assert found[f"{part}_ms_max"] > 80


@everywhere
def test_buffers_are_those_of_stock_at_each_forward(device: torch.device, view: bool) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    module.register_buffer("constant", torch.arange(9.0))
    seen: list[list[list[Tensor]]] = []
    for wrapper, where in ((Stock, device_of_stock(device)), (DistributedDataParallel, device)):
        ddp = wrapper(copy.deepcopy(module).to(where), gradient_as_bucket_view=view)
        values: list[list[Tensor]] = []
        ddp.module.register_forward_pre_hook(
            lambda module, _, values=values: values.append(
                [buffer.detach().clone().cpu() for buffer in module.buffers()]
            )
        )
        for number in range(STEPS):
            ddp(batch(number).to(where)).square().mean().backward()
            ddp.zero_grad()
        seen.append(values)
    stock, ours = seen
    assert len(ours) == len(stock) == STEPS
    for number, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        for expected, buffer in zip(theirs, mine, strict=True):
            torch.testing.assert_close(buffer, expected, msg=f"forward {number}")
    assert_same_on_all_ranks(ours[-1])
