"""Two encoders with a group each and large buckets, on four ranks; the order changes midway.

Stock: works, since each group has its own collectives.
"""

import torch
import torch.distributed as dist
from torch import nn

RANKS = 4


def program(DDP, record):
    rank = dist.get_rank()
    nets = [nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)) for _ in range(2)]
    wrapped = [DDP(net, process_group=dist.new_group()) for net in nets]
    params = [param for net in nets for param in net.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(12):
        optimizer.zero_grad()
        x = torch.randn(8, 256, generator=generator)
        order = [0, 1] if step < 4 or (rank + step) % 2 else [1, 0]
        outputs = {number: wrapped[number](x) for number in order}
        (outputs[0] * outputs[1]).mean().backward()
        for number, net in enumerate(nets):
            for name, param in net.named_parameters():
                record.near(f"step {step}, net {number}, norm of {name}", param.grad.norm())
        optimizer.step()
