"""``copy.deepcopy(ddp)`` as a moving average, evaluated by itself; a state loaded midway.

And a BatchNorm in a checkpoint. Stock: buffers are rank 0's at each forward, of either wrapper.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU())
        self.second = nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def program(DDP, record):
    ddp = DDP(Checkpointed())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    average = copy.deepcopy(ddp)
    held_out = torch.randn(16, 128, generator=torch.Generator().manual_seed(77))
    for step in range(50):
        optimizer.zero_grad()
        ddp(torch.randn(8, 128, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), ddp.parameters(), strict=True):
                mean.lerp_(param, 0.1)
            for mean, buffer in zip(average.buffers(), ddp.buffers(), strict=True):
                mean.copy_(buffer)
            if step % 5 == 4:
                average.eval()
                for number in range(2):
                    record(f"step {step}, average {number}", average(held_out))
        if step == 24:
            saved = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
        if step == 35:
            ddp.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            record.model("loaded", ddp.module)
