"""How much of the host a step takes on a GPU: calls of the package, and of torch and C by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from recording.device import recording
from steady_step import WARM_UP, noting
from torch import Tensor, nn

import tritonddp
from tritonddp import DistributedDataParallel

# Calls that only the recorded device makes.
_OF_RECORDER = ("__torch_function__", "<lambda>")
LIBRARY = str(Path(tritonddp.__file__).parent)


@dataclass
class Calls:
    """Of one step, on this thread.

    Attributes:
        of_package: functions of the package, by file and name.
        of_others: functions of torch and C that the package calls, by file, line and name.
    """

    of_package: Counter[tuple[str, str]] = field(default_factory=Counter)
    of_others: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """For ``sys.setprofile``."""
        code = frame.f_code
        if event == "call":
            if code.co_filename.startswith(LIBRARY):
                name = getattr(code, "co_qualname", code.co_name)  # of Python 3.11
                self.of_package[code.co_filename[len(LIBRARY) + 1 :], name] += 1
                return
            caller = frame.f_back
            name = code.co_name
        elif event == "c_call":
            caller, name = frame, getattr(argument, "__qualname__", str(argument))
        else:
            return
        if caller is not None and caller.f_code.co_filename.startswith(LIBRARY):
            file = caller.f_code.co_filename[len(LIBRARY) + 1 :]
            if name not in _OF_RECORDER:
                self.of_others[file, caller.f_lineno, name] += 1


class _Scaled(torch.autograd.Function):
    """``x * vector``; the gradient of ``vector`` lies in ``memory``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor, memory: Tensor) -> Tensor:
        ctx.save_for_backward(vector)
        ctx.memory = memory
        return x * vector

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        vector, memory = *ctx.saved_tensors, ctx.memory
        own = torch.empty(0, device=grad.device).set_(memory)  # nobody else holds it
        return grad * vector, own.copy_(grad), None


class Vectors(nn.Module):
    """Parameters whose gradients lie where they lay so many steps before; ``own``: anywhere."""

    def __init__(self, count: int, size: int, period: int, own: bool = False) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(count))
        self._period, self._steps, self._own = period, 0, own
        self._memory: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self._own:
            for vector in self.vectors:
                x = x * vector
            return x.sum()
        if not self._memory:
            self._memory = [
                [torch.empty_like(x) for _ in self.vectors] for _ in range(self._period)
            ]
        self._steps += 1
        memory = self._memory[self._steps % self._period]
        for vector, own in zip(self.vectors, memory, strict=True):
            x = _Scaled.apply(x, vector, own)
        return x.sum()


def step_calls(
    count: int, buckets: int, moves: bool = False, size: int = 64, own: bool = False, **options: Any
) -> Calls:
    """What a steady step of ``count`` parameters in so many buckets calls.

    Args:
        moves: gradients lie elsewhere than in the steps before.
        own: nobody else holds the memory of a gradient.
    """
    cap = size * 4 * count / buckets / 2**20
    with recording() as recorder:
        module = Vectors(count, size, period=7 if moves else 1, own=own).to("cuda")
        ddp = DistributedDataParallel(module, bucket_cap_mb=cap, **options)
        inputs = torch.ones(size, device="cuda")

        def step() -> None:
            ddp.zero_grad()
            recorder.step_begins()
            ddp(inputs).backward()
            torch.cuda.synchronize()  # as loss.item() does

        for _ in range(WARM_UP + 1):
            step()
        assert len(ddp.reducer.buckets) == buckets
        ddp.zero_grad()
        recorder.step_begins()
        found = Calls()
        with noting(found.note):
            ddp(inputs).backward()
    return found
