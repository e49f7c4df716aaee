"""The oracle: the mean over ranks of what each rank's own, unwrapped model computes.

Every rank computes it alone, without communication: it plays all ranks, one after the other, on
copies of the unwrapped model. So a case draws its data from torch's generator, which is seeded by
rank and step, and asks for nothing else that differs between ranks but the ``rank`` it is given.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks
from torch import Tensor, nn

from tritonddp import DistributedDataParallel


class Alone(nn.Module):
    """The unwrapped model, with the methods of a wrapped one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


Net = Alone | DistributedDataParallel


def one_per_rank(module: nn.Module) -> list[Alone]:
    """Copies of the unwrapped model: what each rank would train alone."""
    return [Alone(copy.deepcopy(module)) for _ in range(dist.get_world_size())]


def seed(rank: int, step: int) -> None:
    """What ``rank`` draws in ``step``, whoever plays it."""
    torch.manual_seed(1000 * step + rank)


def mean_over_ranks(alone: Sequence[nn.Module]) -> list[Tensor | None]:
    """The gradient that each parameter must have, given one unwrapped model per rank.

    A parameter that some ranks did not use counts as zero there. ``None`` where no rank has a
    gradient.
    """
    means: list[Tensor | None] = []
    for params in zip(*(model.parameters() for model in alone), strict=True):
        grads = [param.grad.detach() for param in params if param.grad is not None]
        means.append(sum(grads, torch.zeros_like(grads[0])) / len(params) if grads else None)
    return means


def assert_gradients(ddp: nn.Module, expected: Sequence[Tensor | None], what: str) -> None:
    """``.grad`` is as expected, to rounding in its dtype, and the same bit for bit on all ranks."""
    for (name, param), mean in zip(ddp.named_parameters(), expected, strict=True):
        where = f"{what}: gradient of {name} on rank {dist.get_rank()}"
        if mean is None:
            assert param.grad is None, f"{where} was made, but no rank used the parameter"
            continue
        assert param.grad is not None, f"{where} is missing"
        tolerance = 1e-12 if param.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            param.grad,
            mean,
            rtol=tolerance,
            atol=tolerance * max(1.0, float(mean.detach().abs().max()) if mean.numel() else 0.0),
            msg=lambda text, where=where: f"{where}: {text}",
        )
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()], what)


def assert_mean(ddp: nn.Module, alone: Sequence[nn.Module], what: str) -> None:
    """``ddp`` has the mean of the gradients of the unwrapped models, which then have it too."""
    expected = mean_over_ranks(alone)
    assert_gradients(ddp, expected, what)
    adopt(alone, expected)


def adopt(alone: Sequence[nn.Module], expected: Sequence[Tensor | None]) -> None:
    """Give the unwrapped models the gradients that the wrapped one has after a reduction."""
    for model in alone:
        for param, mean in zip(model.parameters(), expected, strict=True):
            param.grad = None if mean is None else mean.clone()
