"""Codes that store the numbers of a block as bytes. A new wire format needs only a new code.

A *block* is 256 consecutive elements of one gradient: a scale, fp32, and 256 integers from
``-limit`` to ``limit``, encoded in ``nbytes`` bytes. The value of an element is its number times
the scale: see ``reference.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Elements in a block.
BLOCK = 256


@dataclass(frozen=True)
class BlockCode:
    """A code of blocks, on the CPU and, by its Triton functions, on GPUs."""

    name: str  # name for the user
    limit: float  # largest number, at most 127
    nbytes: int  # bytes of a block, a multiple of 16
    dtype: torch.dtype  # dtype of a code in memory; one byte
    write: Callable[[Tensor, Tensor], object]  # (codes (n, nbytes), numbers (n, 256) of fp32)
    read: Callable[[Tensor, Tensor], object]  # (numbers, codes)
    triton: str  # module of the Triton functions ``write`` and ``read``

    @property
    def constexprs(self) -> tuple[Any, ...]:
        """Compile-time constants of the kernels: ``(limit, nbytes, write, read)``."""
        functions = importlib.import_module(self.triton)
        return self.limit, self.nbytes, functions.write, functions.read


def _write_pairs(codes: Tensor, numbers: Tensor) -> None:
    """Write two numbers per byte, the first one in its lower half."""
    pairs = numbers.to(torch.int8).view(-1, BLOCK // 2, 2)
    upper = pairs[..., 1].bitwise_left_shift(4)
    codes.copy_(pairs[..., 0].bitwise_and(0xF).bitwise_or_(upper).view(torch.uint8))


def _read_pairs(numbers: Tensor, codes: Tensor) -> None:
    pairs, signed = numbers.view(-1, BLOCK // 2, 2), codes.view(torch.int8)
    pairs[..., 0].copy_(signed.bitwise_left_shift(4).bitwise_right_shift_(4))
    pairs[..., 1].copy_(signed.bitwise_right_shift(4))


INT8 = BlockCode(
    "int8", 127.0, BLOCK, torch.int8, Tensor.copy_, Tensor.copy_, f"{__package__}.int8"
)
INT4 = BlockCode(
    "int4", 7.0, BLOCK // 2, torch.uint8, _write_pairs, _read_pairs, f"{__package__}.int4"
)
