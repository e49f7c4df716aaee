"""Programs put attributes on the wrapper: ``model.config = ...``, ``model.sync = ...``.

Stock: they are kept, and harmless.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

NAMES = [
    *("config", "group", "sync", "core", "caps", "traced", "buffer_sync", "state_broadcast"),
    *("metrics", "grad_norm", "_window", "_low", "_figures", "_config", "_core", "_group"),
]


def program(DDP, record):
    for name in NAMES:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        ddp = DDP(net)
        try:
            setattr(ddp, name, {"hidden": 32})
            _train(ddp)
            copy.deepcopy(ddp)
        except (AttributeError, TypeError, KeyError) as error:
            record(f"with ddp.{name} set", f"{type(error).__name__}: {error}")
        else:
            record(f"with ddp.{name} set", getattr(ddp, name))
            record.model(f"with ddp.{name} set", net)


def _train(ddp: nn.Module) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        optimizer.step()
