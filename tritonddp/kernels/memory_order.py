"""The memory order of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_strides(param: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient of ``param`` by autograd's layout contract.

    These are the parameter's strides if it is dense without overlap, else row-major (see the
    comment "Gradient Layout Contract" in ``torch/csrc/autograd/functions/accumulate_grad.h``).
    """
    if dims_by_stride(param.shape, param.stride()) is not None:
        return param.stride()
    return torch.empty(param.shape, device="meta").stride()


def dims_by_stride(
    shape: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Return stride, size and index of each dimension whose size is not 1, innermost first.

    Two tensors of one shape with equal results have the same memory order. ``None`` if the strides
    leave gaps or overlap, or if there is no element.
    """
    numbered = zip(strides, shape, range(len(shape)), strict=True)
    dims = sorted(each for each in numbered if each[1] != 1)
    expected = 1
    for stride, size, _ in dims:
        if stride != expected:
            return None
        expected *= size
    return dims
