"""Rank 0 makes a Grad-CAM of ``ddp.module`` every six steps, with hooks and a backward.

Stock: its own affair, and the buffers of BatchNorm go on as rank 0 has them.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def program(DDP, record):
    rank = dist.get_rank()
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(24):
        optimizer.zero_grad()
        ddp(torch.randn(4, 1, 8, 8, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        optimizer.step()
        if rank == 0 and step % 6 == 5:
            net.eval()
            record(f"map of step {step}", _grad_cam(net))
            net.train()
            optimizer.zero_grad()


def _grad_cam(net: nn.Sequential) -> Tensor:
    seen: list[Tensor] = []
    handle = net[0].register_forward_hook(lambda module, args, output: seen.append(output))
    out = net(torch.linspace(-1, 1, 64).view(1, 1, 8, 8))
    handle.remove()
    (features,) = seen
    features.retain_grad()
    out.max().backward()
    assert features.grad is not None
    return (features.grad.mean((2, 3), keepdim=True) * features).sum(1).relu()
