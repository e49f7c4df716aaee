"""Callbacks at the end of the backward, as FSDP has them, look at gradients.

One is queued by a hook of the output, one by a hook of the last parameter. Stock: each sees what is
there when its turn comes.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable


def program(DDP, record):
    net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen: list[tuple[str, Tensor]] = []

    def look_in_the_end(title: str) -> None:
        Variable._execution_engine.queue_callback(
            lambda: seen.append((title, net[2].weight.grad.norm()))
        )

    net[0].weight.register_post_accumulate_grad_hook(lambda param: look_in_the_end("late"))
    for step in range(20):
        optimizer.zero_grad()
        out = ddp(torch.randn(8, 128, generator=generator))
        out.register_hook(lambda gradient: look_in_the_end("early"))
        seen.clear()
        out.pow(2).mean().backward()
        for title, norm in seen:
            record(f"step {step}, {title}", norm)
        record.model(f"step {step}", net)
        optimizer.step()
