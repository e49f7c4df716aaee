"""The subclass of many projects: attributes that DDP does not have are those of the module.

Stock: ``ddp.config.hidden`` is the module's.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NAMES = {
    "config": SimpleNamespace(hidden=32),
    "group": "a group",
    "sync": "sync",
    "caps": 3,
    "traced": False,
    "buffer_sync": "buffers",
    "state_broadcast": None,
    "scale": 0.5,
    "core": "core",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in NAMES.items():
            setattr(self, name, value)
        self.body, self.head = nn.Linear(16, self.config.hidden), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def program(DDP, record):
    class Forwarding(DDP):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    ddp = Forwarding(Net())
    for name in NAMES:
        is_its = getattr(ddp, name) is getattr(ddp.module, name)
        record(f"ddp.{name} is the module's", is_its)
    record("ddp.body", type(ddp.body).__name__)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()
    record("hidden", ddp.config.hidden)
