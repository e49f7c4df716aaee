"""What a rank saw: tensors as they were, in a form that travels between processes at no cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A tensor as it was.

    Attributes:
        dtype, shape, strides: of the tensor; a sparse one has no strides.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    content: bytes  # its elements, row by row, those that a sparse one leaves out too

    @staticmethod
    def of(tensor: Tensor) -> Snapshot:
        # (A copy, since memory that numpy has seen can no longer be freed by hand.)
        rows = dense(tensor.detach()).contiguous().clone().view(-1).view(torch.uint8)
        strides = None if tensor.is_sparse else tensor.stride()
        return Snapshot(tensor.dtype, tuple(tensor.shape), strides, rows.numpy().tobytes())

    def tensor(self) -> Tensor:
        """Another one with the same content, row-major or sparse."""
        if not self.content:
            return torch.empty(self.shape, dtype=self.dtype)
        rows = torch.frombuffer(bytearray(self.content), dtype=self.dtype).view(self.shape)
        return rows.to_sparse(1) if self.strides is None else rows


def dense(tensor: Tensor) -> Tensor:
    """The same elements, those that a sparse one leaves out too."""
    return tensor.to_dense() if tensor.is_sparse else tensor


@dataclass(frozen=True)
class Entry:
    """One thing that a rank saw.

    Attributes:
        kind: ``"loss"``, ``"gradient"``, ``"parameter"``, ``"buffer"`` or ``"value"``.
        seen: ``None`` where there is no tensor; or something else, as its ``repr``.
    """

    action: int  # number of the action after which it was seen
    kind: str
    name: str  # of the parameter, say
    seen: Snapshot | str | None

    @property
    def place(self) -> tuple[int, str, str]:
        return self.action, self.kind, self.name


Trace = list[Entry]
