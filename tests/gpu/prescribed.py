"""A model whose every gradient is prescribed, and the exact mean of what ranks prescribe.

In small whole numbers the mean is exact in every dtype, so each bit can be checked. They come from
the place of an element, the parameter, the rank and the step: a gradient in the wrong place, of the
wrong step or of one rank alone is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from distributed import assert_same_bits
from torch import Tensor, nn

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# Every dtype and layout, and enough elements for several buckets of 0.25 MiB.
ZOO = [
    *[((), FP32), ((0,), FP32), ((64,), FP32), ((17, 9), FP32), ((50_001,), FP32)],
    *[((4, 3, 5, 5), FP32), ((300, 257), FP32), ((64,), FP64), ((7, 5), FP64)],
    *[((33,), BF16), ((16, 3, 3, 3), BF16), ((150_000,), BF16), ((1,), BF16)],
    *[((4099,), FP16), ((3, 0), FP16), ((8, 8), FP16)],
]
SMALL = [((64,), FP32)] * 40
CAP = 0.25

Given = Sequence[Tensor | None]
NONE: Given = [None] * len(ZOO)


class Prescribed(nn.Module):
    """The gradient of each parameter is the tensor that the forward is given for it.

    Bit for bit: it is 1.0 times that tensor. ``None`` leaves a parameter out. Gradients come in
    the order of registration, while the first buckets guess the reverse.
    """

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape, dtype in kinds)
        for param in self.params:
            if param.dim() == 4:
                param.data = param.data.contiguous(memory_format=torch.channels_last)

    def forward(self, given: Given) -> Tensor:
        pairs = [*zip(self.params, given, strict=True)]
        return torch.stack(
            [(param * grad).sum().double() for param, grad in reversed(pairs) if grad is not None]
        ).sum()


def prescription(
    module: Prescribed, rank: int, step: int, device: torch.device | str, left_out: Any = ()
) -> list[Tensor | None]:
    """What one rank prescribes in one step; parameters whose number is in ``left_out`` get None."""
    given: list[Tensor | None] = []
    for number, param in enumerate(module.params):
        values = torch.arange(param.numel()) % 11 + number % 7 + 9 * rank + 2 * step
        grad = torch.empty_like(param, device="cpu").copy_(values.view(param.shape))
        given.append(None if number in left_out else grad.to(device))
    return given


def mean(per_rank: Sequence[Given]) -> list[Tensor | None]:
    """The mean over ranks, of prescriptions on the CPU; None where no rank has a gradient."""
    means: list[Tensor | None] = []
    for grads in zip(*per_rank, strict=True):
        there = [grad for grad in grads if grad is not None]
        total = sum(grad.double() for grad in there)
        means.append((total / len(grads)).to(there[0].dtype) if there else None)
    return means


def added(first: Given, second: Given) -> list[Tensor | None]:
    """Sums; None is nothing."""
    return [
        b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)
    ]


def assert_gradients(ddp: nn.Module, expected: Given, what: str) -> None:
    for number, (param, mean) in enumerate(zip(ddp.parameters(), expected, strict=True)):
        grad = None if param.grad is None else param.grad.cpu()
        assert_same_bits(grad, mean, f"{what}: gradient {number}, {tuple(param.shape)}")
