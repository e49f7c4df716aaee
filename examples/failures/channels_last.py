"""A model becomes channels_last after wrapping, and convolution gradients are scrambled.

pytorch/pytorch#157862 (2025) and many others report the warning that strides do not match, which
"is not an error, but may impair performance". This is true if all shapes are 1 x 1. After a
conversion, DDP copies means back in another order than it read the gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def train(ranks: slice, with_ddp: bool) -> Tensor:
    """Return the parameters after training on the batches of these ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model: Any = DistributedDataParallel(net) if with_ddp else net
    model.to(memory_format=torch.channels_last)  # as trainer callbacks or options do
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(20):
        images = torch.randn(2, 8, 3, 12, 12)[ranks].flatten(0, 1)
        optimizer.zero_grad()
        model(images.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def main() -> None:
    dist.init_process_group("gloo")
    rank, expected = dist.get_rank(), train(slice(2), with_ddp=False)
    found = train(slice(rank, rank + 1), with_ddp=True)
    off = (100 * (found - expected).norm() / expected.norm()).item()
    if rank == 0:
        word = "right" if off < 1e-3 else "wrong"
        print(f"verdict: {word}: the parameters are off those of one process by {off:.1g} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
