"""Count the calls of a step on a GPU: functions of the package, and functions that they call."""

from __future__ import annotations

from typing import Any

import torch
from recording.device import recording
from steady_step import WARM_UP, Calls, Vectors, noting
from torch import Tensor

from tritonddp import DistributedDataParallel


class _Scaled(torch.autograd.Function):
    """``x * vector``, with the gradient of ``vector`` in ``memory``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor, memory: Tensor) -> Tensor:
        ctx.save_for_backward(vector)
        ctx.memory = memory
        return x * vector

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        vector, memory = *ctx.saved_tensors, ctx.memory
        own = torch.empty(0, device=grad.device).set_(memory)  # not referenced elsewhere
        return grad * vector, own.copy_(grad), None


class Moving(Vectors):
    """Gradients have the same addresses as ``period`` steps before."""

    def __init__(self, count: int, size: int, period: int) -> None:
        super().__init__(count, size)
        self._memory: list[list[Tensor]] = [[] for _ in range(period)]

    def forward(self, x: Tensor) -> Tensor:
        memory = self._memory.pop(0) or [torch.empty_like(x) for _ in self.vectors]
        self._memory.append(memory)
        for vector, own in zip(self.vectors, memory, strict=True):
            x = _Scaled.apply(x, vector, own)
        return x.sum()


def step_calls(
    count: int, buckets: int, moves: bool = False, size: int = 64, **options: Any
) -> Calls:
    """Count the calls of a steady step of ``count`` parameters in ``buckets`` buckets.

    Args:
        moves: gradients have other addresses than in the previous steps.
    """
    cap = size * 4 * count / buckets / 2**20
    with recording() as recorder:
        module = Moving(count, size, period=7 if moves else 1)
        ddp = DistributedDataParallel(module.to("cuda"), bucket_cap_mb=cap, **options)
        inputs = torch.ones(size, device="cuda")

        for _ in range(WARM_UP + 1):
            ddp.zero_grad()
            recorder.step_begins()
            ddp(inputs).backward()
            torch.cuda.synchronize()  # as loss.item() does
        assert len(ddp.reducer.buckets) == buckets
        ddp.zero_grad()
        recorder.step_begins()
        found = Calls()
        with noting(found.note):
            ddp(inputs).backward()
    return found
