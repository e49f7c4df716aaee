"""Hooks of the old kind, on AccumulateGrad nodes, put there after wrapping, clamp ``.grad``.

Stock: the gradient has been copied into its bucket by then, so they do not change the mean.
Elsewhere they do, as hooks on the parameter do everywhere.
"""

import torch
import torch.distributed as dist
from torch import nn

from hostile.outcomes import Expected

EXPECTED = Expected(
    "A hook on an AccumulateGrad node (`grad_fn.next_functions`), put there after wrapping",
    keys=r"^step \d+: |^step [1-9]\d*, ",  # all but what hooks see in the first step
)


def program(DDP, record):
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    ddp = DDP(net)
    nodes, seen = [], []

    def clamp(param: nn.Parameter) -> None:
        seen.append(param.grad.norm())
        param.grad.clamp_(-1e-4, 1e-4)

    for param in net.parameters():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, param=param: clamp(param))
        nodes.append(node)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        optimizer.zero_grad()
        seen.clear()
        ddp(torch.randn(8, 128, generator=generator)).pow(2).mean().backward()
        record(f"step {step}, this rank's own norms", torch.stack(seen))
        record.model(f"step {step}", net)
        optimizer.step()
