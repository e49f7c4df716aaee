"""A module to train on a device, its inputs, and its gradients."""

from __future__ import annotations

from modules import mlp
from torch import Tensor, nn
from training import drawn

WIDTH = 32


def dense() -> nn.Module:
    return mlp(WIDTH, 64, 64, 64, 8)


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Copies on the CPU, dense."""
    grads = [param.grad for param in module.parameters()]
    return [None if grad is None else grad.to_dense().detach().cpu().clone() for grad in grads]


def batch(step: int) -> Tensor:
    """The inputs of this rank, on the CPU."""
    return drawn(8, WIDTH, step=step)
