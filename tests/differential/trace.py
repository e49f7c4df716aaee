"""What a rank saw: tensors as they were, in a form that travels between processes at no cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A tensor as it was.

    Attributes:
        dtype, shape, strides: of the tensor.
        content: its elements, row by row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    content: bytes

    @staticmethod
    def of(tensor: Tensor) -> Snapshot:
        rows = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return Snapshot(tensor.dtype, tuple(tensor.shape), tensor.stride(), rows.numpy().tobytes())

    def tensor(self) -> Tensor:
        """Another one with the same content, row-major."""
        if not self.content:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.content), dtype=self.dtype).view(self.shape)


@dataclass(frozen=True)
class Entry:
    """One thing that a rank saw.

    Attributes:
        action: number of the action after which it was seen.
        kind: ``"loss"``, ``"gradient"``, ``"parameter"``, ``"buffer"`` or ``"value"``.
        name: of the parameter, say.
        seen: ``None`` where there is no tensor.
    """

    action: int
    kind: str
    name: str
    seen: Snapshot | None

    @property
    def place(self) -> tuple[int, str, str]:
        return self.action, self.kind, self.name


Trace = list[Entry]
