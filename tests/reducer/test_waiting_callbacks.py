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


def waits_in_a_callback(kind: Any, first: int) -> None:
    """From this step on rank 1 waits, in a callback at the end of its backward, for what rank 0
    sends after its own.
    """
    rank, others = dist.get_rank(), dist.new_group()
    ddp = kind(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))

    def wait_in_the_end(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(exchange_with_rank_0)

    def exchange_with_rank_0() -> None:
        dist.send(torch.ones(1), dst=0, group=others)
        dist.recv(torch.empty(1), src=0, group=others)

    for step in range(first + 3):
        waits = step >= first
        out = ddp(drawn(8, 256, step=step))
        if rank == 1 and waits:
            out.register_hook(wait_in_the_end)
        elif rank == 0 and waits:
            # Rank 1 is in its callback before this backward begins. Were it the last of all ranks,
            # it could take part in the whole exchange before its callback.
            dist.recv(torch.empty(1), src=1, group=others)
            if kind is not Stock:
                give_up_after(4, dist.group.WORLD)
        out.pow(2).mean().backward()
        if rank == 0 and waits:
            dist.send(torch.ones(1), dst=1, group=others)


@pytest.mark.parametrize(("size", "first"), [(2, 0), (4, 3)], ids=["", "in shares"])
def test_a_callback_that_waits_for_what_follows_the_backward_is_an_error_of_that_rank(
    size: int, first: int
) -> None:
    """Stock: works, since its buckets have been launched by then."""
    run_ranks(waits_in_a_callback, size, Stock, first)
    named = r"Error: rank [023], (?s:.{,600})\brank 1\b"  # of whichever is the first to say so
    with pytest.raises(pytest.fail.Exception, match=named):
        run_ranks(waits_in_a_callback, size, DistributedDataParallel, first)
