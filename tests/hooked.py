"""Models and training for tests of communication hooks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import tritonddp
from tritonddp.comm.grad_bucket import GradBucket

STOCK = torch.nn.parallel.DistributedDataParallel
OURS = tritonddp.DistributedDataParallel
FIVE_BUCKETS = {"bucket_cap_mb": 16 * 17 * 4 / 1024**2}


def net(layers: int = 5, width: int = 16) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    )


def train(
    model: Any, steps: int = 6, optimizer: Any = None, before: Any = None, width: int = 16
) -> list[float]:
    """Return the losses of a regression. Each rank has other data."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        if before is not None:
            before(step)
        x = torch.randn(8, width, generator=generator)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        losses.append(loss.item())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def power_sgd(model: Any, hook: Any = powerSGD_hook.powerSGD_hook, **options: Any) -> None:
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2} | options
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), hook)


def divide_later(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook that overwrites its buffer and returns another tensor."""
    total = bucket.buffer().clone()
    bucket.buffer().fill_(7)
    for gradient in bucket.gradients():
        assert gradient.is_contiguous()
    work = dist.all_reduce(total, async_op=True)
    return work.get_future().then(lambda done: [done.value()[0] / dist.get_world_size()])
