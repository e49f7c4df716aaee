"""A post-accumulate hook marks each gradient with its learning rate, which the user's step reads.

Another one makes a gradient a tensor of a subclass. Stock: ``.grad`` stays the tensor that was
marked.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Marked(torch.Tensor):
    pass


def program(DDP, record):
    net = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    ddp = DDP(net)

    def mark(param: Tensor) -> None:
        param.grad.rate = 0.1 if param.dim() == 1 else 0.05

    def make_a_subclass(param: Tensor) -> None:
        param.grad = param.grad.as_subclass(Marked)

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(mark)
    net[2].weight.register_post_accumulate_grad_hook(make_a_subclass)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        ddp.zero_grad()
        ddp(torch.randn(8, 128, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        record(f"step {step}, type", type(net[2].weight.grad).__name__)
        with torch.no_grad():
            for name, param in net.named_parameters():
                rate = getattr(param.grad, "rate", None)
                record(f"step {step}, mark of {name}", rate)
                param.sub_(param.grad, alpha=rate or 0.0)
