"""The operations on a bucket, the contenders for each, and the check of a contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.inputs import Inputs
from benchmarks.report.tables import CEILING
from tritonddp.kernels.dispatch import select

OURS = "tritonddp"
MOVED = "tritonddp, moved"  # gradients have new addresses each time: the table is uploaded
SM_COPY = "SM copy"
_BY_ADDRESS = (MOVED, SM_COPY)  # only where kernels read gradients by address

Way = Callable[[Inputs], object]


@dataclass(frozen=True)
class Direction:
    """One operation, which all contenders perform.

    Attributes:
        passes: minimum number of passes over the gradients.
        of_block: minimum number of bytes read and written for each quantized block.
        check_one: runs a contender once (the flag says whether it is ours), with NaN in its output
            unless it works in place; raises a RuntimeError if the result is wrong.
    """

    passes: int
    of_block: int
    check_one: Callable[[Way, bool, Inputs], None]
    ways: dict[str, Way]

    def nbytes(self, inputs: Inputs) -> int:
        """Return the minimum number of bytes that must be read and written."""
        blocks = inputs.quantized.message_layout.blocks if self.of_block else 0
        return self.passes * inputs.nbytes + self.of_block * blocks

    def contenders(self, device: torch.device) -> dict[str, Way]:
        """Return the contenders for this device, after the plain copies of as many bytes."""
        every = {CEILING: self._copy, **self.ways, SM_COPY: self._sm_copy}
        by_address = select(device).takes_pointers
        return {name: way for name, way in every.items() if by_address or name not in _BY_ADDRESS}

    def check(self, name: str, inputs: Inputs) -> None:
        """Raise a RuntimeError if a contender's result is wrong for any element."""
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
        """Copy with a kernel: the driver copies contiguous tensors itself."""
        target, source = inputs.halves(self.nbytes(inputs))
        torch.bitwise_and(source, -1, out=target)


def require(found: Tensor, expected: Tensor, tolerance: Tensor | float = 0.0) -> None:
    """Raise a RuntimeError if an element is NaN or differs by more than ``tolerance``."""
    if torch.equal(found, expected):
        return
    wrong = int((~((found.float() - expected.float()).abs() <= tolerance)).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {expected.numel()} elements are wrong")


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
