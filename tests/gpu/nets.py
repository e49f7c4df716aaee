"""Nets that are trained on a device, what they are given, and the mean over ranks that they get."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 32


def dense() -> nn.Module:
    widths = [WIDTH, 64, 64, 64, 8]
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))


def batch(step: int, rank: int | None = None, shape: tuple[int, ...] = (8, WIDTH)) -> Tensor:
    """What ``rank``, by default this one, is given in a step, on the CPU."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Those that there are, dense and on the CPU."""
    grads = [param.grad for param in module.parameters()]
    return [None if grad is None else grad.to_dense().detach().cpu().clone() for grad in grads]


def mean_gradients(alone: nn.Module, loss_of: Callable[[int], Tensor]) -> list[Tensor | None]:
    """The mean, in fp64, of the gradients that each rank's loss has in ``alone``."""
    size = dist.get_world_size()
    means: list[Tensor | None] = [None for _ in alone.parameters()]
    for rank in range(size):
        alone.zero_grad()
        loss_of(rank).backward()
        for place, grad in enumerate(gradients(alone)):
            if grad is not None:
                wide = torch.promote_types(grad.dtype, torch.float64)
                part, before = grad.to(wide) / size, means[place]
                means[place] = part if before is None else before + part
    return means
