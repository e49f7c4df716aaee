"""What a rank saw: tensors as they were, in a form that travels between processes at no cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A tensor as it was.

    Attributes:
        strides: ``None`` if the tensor is sparse.
        content: the elements, row by row, and zeros for those that a sparse tensor leaves out.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    content: bytes

    @staticmethod
    def of(tensor: Tensor) -> Snapshot:
        # A copy: memory that numpy has seen can no longer be freed explicitly.
        rows = dense(tensor.detach()).contiguous().clone().view(-1).view(torch.uint8)
        strides = None if tensor.is_sparse else tensor.stride()
        return Snapshot(tensor.dtype, tuple(tensor.shape), strides, rows.numpy().tobytes())

    def tensor(self) -> Tensor:
        """Another tensor with the same content, row-major or sparse."""
        if not self.content:
            return torch.empty(self.shape, dtype=self.dtype)
        rows = torch.frombuffer(bytearray(self.content), dtype=self.dtype).view(self.shape)
        return rows.to_sparse(1) if self.strides is None else rows

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...], bool]:
        return self.dtype, self.shape, self.strides is None

    @property
    def order(self) -> list[int]:
        """The strides, without those of dimensions of one element."""
        if self.strides is None or 0 in self.shape:
            return []
        return [n for size, n in zip(self.shape, self.strides, strict=True) if size > 1]


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


@dataclass(frozen=True)
class Entry:
    """One thing that a rank saw.

    Attributes:
        action: the number of the action after which it was seen.
        kind: ``"loss"``, ``"gradient"``, ``"parameter"``, ``"buffer"`` or ``"value"``.
        name: for example of the parameter.
        seen: ``None`` if there is no tensor; the ``repr`` of a value that is not a tensor.
    """

    action: int
    kind: str
    name: str
    seen: Snapshot | str | None

    @property
    def place(self) -> tuple[int, str, str]:
        return self.action, self.kind, self.name


Trace = list[Entry]
