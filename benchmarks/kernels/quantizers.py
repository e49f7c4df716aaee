"""Ways to quantize a bucket, sum the parts of all ranks, and write the sums: ours and torch's.

With error feedback, for rank 0 of 8. Torch's versions are straightforward code for a whole bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernels.directions import OURS, Direction, Way, joined, require
from benchmarks.kernels.inputs import QUANTIZED_RANKS, Inputs
from tritonddp._torch import foreach_copy_
from tritonddp.kernels.dispatch import select_quantized
from tritonddp.kernels.quantized.buffer import Sections
from tritonddp.kernels.quantized.code import BLOCK, INT8

_NUMBERS = BLOCK + 4  # bytes per block
_RESIDUAL = 2 * 4 * BLOCK  # bytes read and written per block
_STEP = 0.51 / INT8.limit  # rounding error of a block, plus fp32's, relative to its maximum


def _torch_quantize(inputs: Inputs) -> None:
    (blocks, views), residual = inputs.blocks, inputs.quantized.residuals.sent
    foreach_copy_(views, inputs.grads)
    blocks.div_(QUANTIZED_RANKS).view(-1, BLOCK)[: len(residual)].add_(residual)
    numbers, scales, *_ = inputs.quantized.outgoing
    _encode(blocks, numbers, scales, residual)


def _torch_reduce(inputs: Inputs) -> None:
    numbers, scales, *_ = inputs.quantized.incoming
    residual = inputs.quantized.residuals.reduced
    total = _decoded(inputs.quantized.incoming).sum(0).add_(residual)
    _encode(total, numbers[0], scales[0], residual)


def _torch_dequantize(inputs: Inputs) -> None:
    (blocks, views), (numbers, scales, *_) = inputs.blocks, inputs.quantized.result
    torch.mul(numbers, scales[..., None], out=blocks)
    foreach_copy_(inputs.grads, views)


def _encode(values: Tensor, numbers: Tensor, scales: Tensor, residual: Tensor) -> None:
    scales.copy_(values.abs().amax(-1) / INT8.limit)
    numbers.copy_((values / scales.clamp_min(1e-30)[..., None]).round_())
    left = values - numbers * scales[..., None]
    residual.copy_(left.view(-1, BLOCK)[: len(residual)])


def _decoded(sections: Sections) -> Tensor:
    return sections.numbers.float() * sections.scales[..., None]


def _randomized(sections: Sections) -> Tensor:
    """Fill the sections with random numbers, and return the values that they encode."""
    sections.numbers.random_(-127, 128)
    sections.scales.uniform_(0.5, 1)
    return _decoded(sections)


def _check_encoded(found: Tensor, residual: Tensor, expected: Tensor) -> None:
    """Check that sent values are close to the expected ones, and the residual is the rest."""
    found, expected = (each.view(-1, BLOCK)[: len(residual)] for each in (found, expected))
    largest = expected.abs().amax(-1, keepdim=True)
    require(found, expected, _STEP * largest)
    require(found + residual, expected, 1e-5 * largest)


def _check_quantize(way: Way, _: bool, inputs: Inputs) -> None:
    flat, (blocks, views) = inputs.quantized, inputs.blocks
    flat.residuals.sent.zero_()
    blocks.zero_()
    foreach_copy_(views, inputs.grads)
    expected = blocks / QUANTIZED_RANKS
    flat.message.fill_(255)  # these bytes are a NaN scale
    way(inputs)
    _check_encoded(_decoded(flat.outgoing), flat.residuals.sent, expected)


def _check_reduce(way: Way, _: bool, inputs: Inputs) -> None:
    """Check a reduction in place: the first row becomes the sum."""
    flat = inputs.quantized
    flat.residuals.reduced.zero_()
    expected = _randomized(flat.incoming).sum(0)
    way(inputs)
    _check_encoded(_decoded(flat.incoming)[0], flat.residuals.reduced, expected)


def _check_dequantize(way: Way, _: bool, inputs: Inputs) -> None:
    blocks, views = inputs.blocks
    blocks.copy_(_randomized(inputs.quantized.result))
    expected = joined(views).to(inputs.block.dtype)
    blocks.fill_(torch.nan)
    inputs.block.fill_(torch.nan)
    way(inputs)
    require(joined(inputs.grads), expected)


_TORCH = "torch, whole bucket"
# Rank 0 reduces its share of the blocks, from all ranks.
_REDUCED = _NUMBERS + (_NUMBERS + _RESIDUAL) // QUANTIZED_RANKS
_QUANTIZE = {
    OURS: lambda of: select_quantized(of.block.device).quantize(
        of.quantized, of.grads, [True] * len(of.grads), 1 / QUANTIZED_RANKS
    ),
    _TORCH: _torch_quantize,
}
_REDUCE = {
    OURS: lambda of: select_quantized(of.block.device).reduce_parts(of.quantized),
    _TORCH: _torch_reduce,
}
_DEQUANTIZE = {
    OURS: lambda of: select_quantized(of.block.device).unflatten(of.quantized, of.grads),
    _TORCH: _torch_dequantize,
}
DIRECTIONS = {
    "quantize": Direction(1, _NUMBERS + _RESIDUAL, _check_quantize, _QUANTIZE),
    "reduce": Direction(0, _REDUCED, _check_reduce, _REDUCE),
    "dequantize": Direction(1, _NUMBERS, _check_dequantize, _DEQUANTIZE),
}
