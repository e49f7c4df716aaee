"""What a program notes down, in a form that is compared bit by bit and travels cheaply."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_SHOWN = 6  # elements in a message


@dataclass(frozen=True)
class Row:
    """One thing that a rank has noted down.

    Attributes:
        key: what it is.
        digest: of dtype, shape and content, the same only if all bits are.
        shown: its first elements, for a message.
        near: a value that only has to be as near as sums in another order are, ``None`` for others.
    """

    key: str
    digest: str
    shown: str
    near: float | None = None

    def is_as(self, other: Row) -> bool:
        """Whether the other side has noted down the same."""
        if self.near is not None and other.near is not None:
            return self.key == other.key and abs(self.near - other.near) <= 1e-4 * abs(self.near)
        return (self.key, self.digest) == (other.key, other.digest)


class Record(list[Row]):
    """All that a rank has noted down, in order."""

    def __call__(self, key: str, value: Any) -> None:
        """A tensor, bit by bit, or anything with a ``repr`` that says it all."""
        if not isinstance(value, Tensor):
            self.append(Row(key, repr(value), repr(value)))
            return
        # A copy, since memory that numpy has seen can no longer be freed by hand.
        rows = value.detach().clone().contiguous().view(-1)
        content = rows.view(torch.uint8).numpy().tobytes() if rows.numel() else b""
        kind = f"{value.dtype} {tuple(value.shape)}"
        shown = ", ".join(str(each) for each in rows[:_SHOWN].tolist())
        digest = hashlib.sha256(kind.encode() + content).hexdigest()
        self.append(Row(key, digest, f"{kind} [{shown}]"))

    def near(self, key: str, value: Tensor) -> None:
        """One number that sums in another order may have rounded differently."""
        self.append(Row(key, "", f"{value.item():.9g}", value.item()))

    def model(self, key: str, module: nn.Module) -> None:
        """Parameters, gradients and buffers."""
        for name, param in module.named_parameters():
            self(f"{key}: {name}", param)
            self(f"{key}: {name}.grad", param.grad)
        for name, buffer in module.named_buffers():
            self(f"{key}: buffer {name}", buffer)
