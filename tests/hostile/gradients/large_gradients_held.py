"""Large gradients, some held by a hook as they come, are looked at after the backward.

Stock: they are the same tensors with the same memory, which holds nothing else. (The buckets of so
large gradients may be in memory that ranks share.)
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def program(DDP, record):
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    ddp = DDP(net)
    held: dict[Tensor, tuple[Tensor, int]] = {}

    def hold(param: Tensor) -> None:
        held[param] = param.grad, param.grad.data_ptr()

    for param in net[:6].parameters():  # the others are held by nobody
        param.register_post_accumulate_grad_hook(hold)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        ddp.zero_grad()
        ddp(torch.randn(8, 512, generator=generator)).pow(2).mean().backward()
        for name, param in net.named_parameters():
            record(f"step {step}, {name}", param.grad)
            record(f"step {step}, bytes of {name}", param.grad.untyped_storage().nbytes())
            record(f"step {step}, {name} begins at 64 bytes", param.grad.data_ptr() % 64)
            if param in held:
                gradient, address = held[param]
                record(f"step {step}, {name} is the same tensor", param.grad is gradient)
                record(f"step {step}, {name} is where it was", param.grad.data_ptr() == address)
                record(f"step {step}, {name} held", gradient)
        held.clear()
