"""The memory order of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_strides(param: Tensor) -> tuple[int, ...]:
    """Strides that a gradient of ``param`` has by autograd's layout contract.

    The parameter's own if it is dense without overlap, else row-major (see the comment "Gradient
    Layout Contract" in ``torch/csrc/autograd/functions/accumulate_grad.h``).
    """
    if dims_by_stride(param.shape, param.stride()) is not None:
        return param.stride()
    return torch.empty(param.shape, device="meta").stride()


def dims_by_stride(
    shape: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Stride, size and number of each dimension, the innermost first, those of size 1 left out.

    Two tensors of one shape with the same answer keep their elements in the same memory order.
    ``None`` if the strides leave gaps, overlap, or hold no element.
    """
    numbered = zip(strides, shape, range(len(shape)), strict=True)
    dims = sorted(each for each in numbered if each[1] != 1)
    expected = 1
    for stride, size, _ in dims:
        if stride != expected:
            return None
        expected *= size
    return dims
