"""Modules that torch.fx or torch.jit has traced, with a scripted part, or scripted.

Stock: as any other module. With BatchNorm, whose buffers TorchScript keeps.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fx": torch.fx.symbolic_trace,
    "part scripted": lambda net: nn.Sequential(nn.Linear(64, 64), torch.jit.script(net)),
    "traced": lambda net: torch.jit.trace(net, torch.randn(4, 64), check_trace=False),
    "scripted": torch.jit.script,
}


def program(DDP, record):
    for title, convert in WAYS.items():
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            ddp = DDP(convert(plain))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(22):
            optimizer.zero_grad()
            ddp(torch.randn(8, 64, generator=generator)).pow(2).mean().backward()
            record.model(f"{title}, step {step}", ddp.module)
            optimizer.step()
