"""How the numbers of a block are coded in bytes. A further wire format is a further code.

A *block* is 256 consecutive elements of one gradient: a scale, fp32, and 256 integer numbers from
``-limit`` to ``limit``, whose code has ``nbytes`` bytes. What an element stands for is number times
scale: see ``reference.py``.
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

    name: str  # for the user
    limit: float  # largest number, at most 127
    nbytes: int  # of a block, a multiple of 16
    dtype: torch.dtype  # of a code in memory: of one byte
    write: Callable[[Tensor, Tensor], object]  # (codes (n, nbytes), numbers (n, 256) of fp32)
    read: Callable[[Tensor, Tensor], object]  # (numbers, codes)
    triton: str  # module of the Triton functions ``write`` and ``read``

    @property
    def constexprs(self) -> tuple[Any, ...]:
        """What kernels are compiled for: ``(limit, nbytes, write, read)``."""
        functions = importlib.import_module(self.triton)
        return self.limit, self.nbytes, functions.write, functions.read


INT8 = BlockCode(
    "int8", 127.0, BLOCK, torch.int8, Tensor.copy_, Tensor.copy_, f"{__package__}.int8"
)
