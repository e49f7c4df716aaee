"""Rank 1 waits, in a callback at the end of its backward, for what rank 0 sends behind its own.

Stock: works, since its buckets have been launched by then.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from hostile.outcomes import Expected

EXPECTED = Expected(
    "A callback at the end of a backward waits for what another rank sends behind its own",
    error=r"Error: rank 0, (?s:.{,600})\brank 1\b",
    timeout=4,
)


def program(DDP, record, first=0):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    ddp = DDP(net)
    others = dist.new_group()
    generator = torch.Generator().manual_seed(rank)

    def wait_in_the_end() -> None:
        Variable._execution_engine.queue_callback(
            lambda: dist.recv(torch.empty(1), src=0, group=others)
        )

    for step in range(8):
        ddp.zero_grad()
        loss = ddp(torch.randn(8, 256, generator=generator)).pow(2).mean()
        if rank == 1 and step >= first:
            loss.register_hook(lambda gradient: wait_in_the_end())
        loss.backward()
        if rank == 0 and step >= first:
            dist.send(torch.ones(1), dst=1, group=others)
        record.near(f"step {step}", net[0].weight.grad.norm())
