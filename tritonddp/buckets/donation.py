"""Does anybody else know of a gradient? Asked before its memory is put to another use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import storage_holders


def is_private(param: Tensor, grads: Sequence[Tensor | None], slot: int) -> bool:
    """Whether a gradient is known to ``param`` and ``grads`` alone."""
    grad = grads[slot]
    return (
        grad is param.grad
        and grad is not None
        and not grad.requires_grad
        and _holders(grad) == _holders_of_a_private_gradient()
    )


def _holders(grad: Tensor) -> tuple[int, ...]:
    return sys.getrefcount(grad), *storage_holders(grad)


@cache
def _holders_of_a_private_gradient() -> tuple[int, ...]:
    """What :func:`is_private` finds for one: how torch counts is its own affair."""
    counts = []

    def likeis_private(param: Tensor, grads: Sequence[Tensor | None], slot: int) -> None:
        grad = grads[slot]
        if grad is param.grad and grad is not None:
            counts.append(_holders(grad))

    param = Parameter(torch.ones(2))
    with torch.enable_grad():
        (param * 2).sum().backward()
    likeis_private(param, [param.grad], 0)
    return counts[0]
