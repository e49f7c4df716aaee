"""An optimizer such as SOAP or Shampoo multiplies gradients with each other.

Stock: each lies at a multiple of 64 bytes, as torch's allocator gives memory. A product of matrices
that lie elsewhere may have other bits.
"""

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    net = nn.Sequential(
        nn.Linear(64, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 10),
    )
    ddp = DDP(net)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        for param in net.parameters():
            param.grad = None
        ddp(torch.randn(16, 64, generator=generator)).pow(2).mean().backward()
        for name, param in net.named_parameters():
            record(f"step {step}, {name} begins at 64 bytes", param.grad.data_ptr() % 64)
            if param.dim() == 2:
                record(f"step {step}, {name}: G G^T", param.grad @ param.grad.T)
