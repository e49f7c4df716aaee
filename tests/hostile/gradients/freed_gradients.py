"""To save memory a loop frees the storage of each gradient as soon as it has been applied.

Stock: it is the gradient's alone.
"""

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    ddp = DDP(net)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        ddp.zero_grad()
        ddp(torch.randn(8, 256, generator=generator)).pow(2).mean().backward()
        with torch.no_grad():
            for name, param in net.named_parameters():
                record(f"step {step}, {name}", param.grad)
                param.sub_(param.grad, alpha=0.05)
                param.grad.untyped_storage().resize_(0)
                param.grad = None
        record.model(f"step {step}", net)
