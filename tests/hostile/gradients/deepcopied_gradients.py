"""Gradients are kept by ``copy.deepcopy``, one by one, and pickled (PCGrad, federated learning).

Stock: a copy costs the bytes of the gradient.
"""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(19)])  # 5 MB: two buckets
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(8, 256, generator=generator)).pow(2).mean().backward()
        kept = {name: copy.deepcopy(param.grad) for name, param in net.named_parameters()}
        for name, gradient in kept.items():
            record(f"step {step}, {name}", gradient)
            record(f"step {step}, bytes of {name}", gradient.untyped_storage().nbytes())
            is_small = len(pickle.dumps(gradient)) < 2 * gradient.nbytes + 2000
            record(f"step {step}, {name} is small when pickled", is_small)
        optimizer.step()
