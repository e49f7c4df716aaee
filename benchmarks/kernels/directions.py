"""What can be done to a bucket, the ways to do it, and how a way is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.inputs import Inputs
from benchmarks.report.tables import CEILING
from tritonddp.kernels.dispatch import select

OURS = "tritonddp"
MOVED = "tritonddp, moved"  # gradients are at other addresses each time: the table is uploaded
SM_COPY = "SM copy"
_BY_ADDRESS = (MOVED, SM_COPY)  # only where kernels read gradients by address

Way = Callable[[Inputs], object]


@dataclass(frozen=True)
class Direction:
    """What all contenders do.

    Attributes:
        passes: over the gradients, at least.
        of_block: the least number of bytes that are read and written for each quantized block.
        check_one: lets a way that is ours or not run once, onto NaN where it does not work in
            place; raises a RuntimeError if the result was wrong.
    """

    passes: int
    of_block: int
    check_one: Callable[[Way, bool, Inputs], None]
    ways: dict[str, Way]

    def nbytes(self, inputs: Inputs) -> int:
        """The least number of bytes that must be read and written."""
        blocks = inputs.quantized.message_layout.blocks if self.of_block else 0
        return self.passes * inputs.nbytes + self.of_block * blocks

    def contenders(self, device: torch.device) -> dict[str, Way]:
        """Those that this device can play, and the copies of as many bytes, one of them first."""
        every = {CEILING: self._copy, **self.ways, SM_COPY: self._sm_copy}
        by_address = select(device).takes_pointers
        return {name: way for name, way in every.items() if by_address or name not in _BY_ADDRESS}

    def check(self, name: str, inputs: Inputs) -> None:
        """Raise a RuntimeError if what a contender makes of all elements is wrong."""
        way = self.contenders(inputs.block.device)[name]
        if name in self.ways:
            self.check_one(way, name in (OURS, MOVED), inputs)
            return
        target, source = inputs.halves(self.nbytes(inputs))
        target.fill_(-1)
        source.fill_(7)
        way(inputs)
        require(target, source)

    def _copy(self, inputs: Inputs) -> None:
        target, source = inputs.halves(self.nbytes(inputs))
        target.copy_(source)

    def _sm_copy(self, inputs: Inputs) -> None:
        """By a kernel: the driver copies contiguous tensors."""
        target, source = inputs.halves(self.nbytes(inputs))
        torch.bitwise_and(source, -1, out=target)


def require(found: Tensor, expected: Tensor, tolerance: Tensor | float = 0.0) -> None:
    """Raise a RuntimeError if an element is NaN, or is off by more than ``tolerance``."""
    if torch.equal(found, expected):
        return
    wrong = int((~((found.float() - expected.float()).abs() <= tolerance)).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {expected.numel()} elements are wrong")


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
