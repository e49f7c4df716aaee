"""A kernel that copies bytes: what a GPU's own cores reach, beside the driver's copy.

``copy_`` of contiguous tensors calls cudaMemcpyAsync, which does not reach the memory's bandwidth
on every GPU, so a share of its speed may say little.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bytes a program: as many as one of ours moves in fp32, by as many warps.
BLOCK, WARPS = 8192, 4


@triton.jit(do_not_specialize=["count"])
def copy_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``BLOCK`` words a program, of 4 bytes; Triton takes 4 of them at a time."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < (count // 16) * 16  # or no access of 16 bytes would be safe
    tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a contiguous ``source``, but for its last 63 bytes at most, to as large a ``target``."""
    count, block = source.nbytes // 4, BLOCK // 4
    words, into = (_words(each, count) for each in (source, target))
    copy_kernel[(triton.cdiv(count, block),)](words, into, count, BLOCK=block, num_warps=WARPS)


def _words(tensor: Tensor, count: int) -> Tensor:
    return tensor.view(torch.uint8)[: 4 * count].view(torch.int32)
