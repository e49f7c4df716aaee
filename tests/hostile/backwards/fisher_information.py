"""Elastic weight consolidation: each rank squares gradients that it makes through ``ddp.module``.

Stock: they are this rank's own; the program itself adds up the squares of all ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def program(DDP, record):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(8, 16, generator=generator)
        y = torch.randint(0, 4, (8,), generator=generator)
        return nn.functional.cross_entropy(model(x), y)

    for _ in range(20):
        optimizer.zero_grad()
        loss_of(ddp).backward()
        optimizer.step()
    record.model("trained", net)
    fisher = [torch.zeros_like(param) for param in net.parameters()]
    for _ in range(20):
        net.zero_grad()
        loss_of(net).backward()
        for total, param in zip(fisher, net.parameters(), strict=True):
            total += param.grad.detach() ** 2
    for number, total in enumerate(fisher):
        dist.all_reduce(total)
        record(f"Fisher information {number}", total)
