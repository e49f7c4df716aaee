"""A callback at the end of a backward that waits for another rank's next call."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import give_up_after, run_ranks
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as Stock
from training import drawn

from tritonddp import DistributedDataParallel


def waits_in_a_callback(kind: Any) -> None:
    """In a callback at the end of its backward, rank 1 waits for a message.

    Rank 0 sends it after its own backward.
    """
    rank, others = dist.get_rank(), dist.new_group()
    ddp = kind(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))

    def wait_in_the_end(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(exchange_with_rank_0)

    def exchange_with_rank_0() -> None:
        dist.send(torch.ones(1), dst=0, group=others)
        dist.recv(torch.empty(1), src=0, group=others)

    for step in range(3):
        out = ddp(drawn(8, 256, step=step))
        if rank == 1:
            out.register_hook(wait_in_the_end)
        else:
            # Rank 1 is in its callback before this backward begins.
            dist.recv(torch.empty(1), src=1, group=others)
            if kind is not Stock:
                give_up_after(4, dist.group.WORLD)
        out.pow(2).mean().backward()
        if rank == 0:
            dist.send(torch.ones(1), dst=1, group=others)


def test_a_callback_that_waits_for_what_follows_the_backward_is_an_error_of_that_rank() -> None:
    """It works under stock DDP, which has launched its buckets by then."""
    run_ranks(waits_in_a_callback, 2, Stock)
    with pytest.raises(pytest.fail.Exception, match=r"Error: rank 0, (?s:.{,600})\brank 1\b"):
        run_ranks(waits_in_a_callback, 2, DistributedDataParallel)
