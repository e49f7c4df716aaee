"""Pruning at step 24: masks are buffers, and each rank draws its own.

Stock: the next forward aligns them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune


def program(DDP, record):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    for layer in (net[0], net[2]):
        prune.identity(layer, "weight")  # so that masks are there when the module is wrapped
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(40):
        if step == 24:
            for layer in (net[0], net[2]):
                drawn = torch.rand(layer.weight_mask.shape, generator=generator)
                layer.weight_mask.copy_((drawn > 0.5).float())
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        optimizer.step()
