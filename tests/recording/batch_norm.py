"""The functions that ``SyncBatchNorm`` rests on, which torch has for a GPU only, in plain torch."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _over_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(x: Tensor, values: Tensor) -> Tensor:
    """One value a channel, to be used beside ``x``."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims = _over_channels(x)
    return x.mean(dims), (x.var(dims, unbiased=False) + eps).rsqrt()


def _gather_stats(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    shares = (counts / counts.sum())[:, None]
    mean = (means * shares).sum(0)
    var = ((invstds**-2 - eps + (means - mean) ** 2) * shares).sum(0)
    if running_mean is not None and running_var is not None:
        total = counts.sum()
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * total / (total - 1), momentum)
    return mean, (var + eps).rsqrt()


def _elemt(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    y = (x - _along(x, mean)) * _along(x, invstd)
    return y if weight is None else y * _along(x, weight) + _along(x, bias)


def _backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *needed: bool
) -> tuple[Tensor, ...]:
    dims = _over_channels(x)
    sum_dy, sum_dy_xmu = grad.sum(dims), (grad * (x - _along(x, mean))).sum(dims)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def _backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Any,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    centred = (x - _along(x, mean)) * _along(x, invstd**2 * sum_dy_xmu / total)
    scale = invstd if weight is None else invstd * weight
    return (grad - _along(x, sum_dy / total) - centred) * _along(x, scale)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Context: they are there."""
    fakes = {
        "batch_norm_stats": _stats,
        "batch_norm_gather_stats_with_counts": _gather_stats,
        "batch_norm_elemt": _elemt,
        "batch_norm_backward_reduce": _backward_reduce,
        "batch_norm_backward_elemt": _backward_elemt,
    }
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch, name, fake))
        yield
