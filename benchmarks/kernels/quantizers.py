"""Ways to quantise a bucket for an all-reduce of 8 ranks: ours, and torch's own operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.timing import Contender
from tritonddp._torch import foreach_copy_
from tritonddp.kernels.dispatch import select, select_quantized
from tritonddp.kernels.flat_buffer import Layout
from tritonddp.kernels.quantized.buffer import (
    BLOCK,
    LIMIT,
    MessageLayout,
    Quantization,
    QuantizedBuffer,
    Residuals,
)

WORLD_SIZE = 8
OURS, EAGER, CEILING = "tritonddp", "torch, eager", "device copy"
KERNELS = ("quantize", "reduce_parts", "dequantize")
_ALIGNED = 512  # bytes: a copy between other addresses is slower


@dataclass(frozen=True)
class Inputs:
    """One bucket of rank 0.

    Attributes:
        grads: row-major, each an allocation of its own.
        flat: with messages of random numbers, and residuals.
        one: the factor of ``dequantize``.
        block: memory for the ceiling, of which a half is copied to the other.
    """

    grads: list[Tensor]
    flat: QuantizedBuffer
    one: Tensor
    block: Tensor

    @classmethod
    def make(
        cls,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Inputs:
        """All gradients, of normal numbers, are quantised."""
        grads = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        strides = [grad.stride() for grad in grads]
        layout = Layout.of(shapes, strides, select(device).alignment)
        quantized = [True] * len(shapes)
        message = MessageLayout(layout.numels, quantized, WORLD_SIZE)
        residuals = Residuals.zeros(message, 0, device)
        quantization = Quantization(message, 0, residuals)
        flat = QuantizedBuffer(quantization, layout, torch.float32, device)
        for sections in (flat.incoming, flat.outgoing):
            sections.numbers.copy_(torch.randn(sections.numbers.shape, device=device) * 40)
            sections.scales.uniform_(0, 1)
            sections.trailers.fill_(1)  # or the sums would say that no rank used a gradient
        flat.flags.fill_(WORLD_SIZE)
        largest = max(nbytes(kernel, message, dtype) for kernel in KERNELS)
        block = torch.zeros(largest + 2 * _ALIGNED, dtype=torch.uint8, device=device)
        return cls(grads, flat, torch.ones(1, dtype=torch.float64, device=device), block)


def nbytes(kernel: str, message: MessageLayout, dtype: torch.dtype) -> int:
    """The least number of bytes that must be read and written by a kernel."""
    elements, blocks = sum(message.numels), message.blocks
    of_block = BLOCK + 4
    if kernel == "quantize":
        return elements * dtype.itemsize + blocks * (2 * 4 * BLOCK + of_block)
    if kernel == "dequantize":
        return elements * dtype.itemsize + blocks * of_block
    owned = message.owned_blocks(0)
    return owned * (2 * 4 * BLOCK + (WORLD_SIZE + 1) * of_block)


def _quantize(inputs: Inputs) -> None:
    flat = inputs.flat
    kernels = select_quantized(flat.message.device)
    kernels.quantize(flat, inputs.grads, [True] * len(inputs.grads), 1 / WORLD_SIZE)


def _reduce_parts(inputs: Inputs) -> None:
    flat = inputs.flat
    select_quantized(flat.message.device).reduce_parts(flat)


def _dequantize(inputs: Inputs) -> None:
    flat = inputs.flat
    kernels = select_quantized(flat.message.device)
    kernels.unflatten(flat, inputs.grads, inputs.one)


def _encoded(values: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    scales = values.abs().amax(1, keepdim=True) / LIMIT
    codes = (values / scales.clamp_min(1e-30)).round().to(torch.int8)
    torch.sub(values, codes.float() * scales, out=residual)
    return codes, scales[:, 0]


def _eager_quantize(inputs: Inputs) -> object:
    flat = inputs.flat
    assert flat.residuals is not None
    residual = flat.residuals.sent
    line = torch.zeros(residual.numel(), device=residual.device)
    pairs = zip(flat.layout.offsets, inputs.grads, strict=True)
    targets = [line[offset : offset + grad.numel()] for offset, grad in pairs]
    foreach_copy_(targets, [grad.view(-1) for grad in inputs.grads])
    values = line.view(-1, BLOCK).div_(WORLD_SIZE).add_(residual)
    return _encoded(values, residual)


def _eager_reduce_parts(inputs: Inputs) -> object:
    flat = inputs.flat
    assert flat.residuals is not None
    residual = flat.residuals.reduced
    numbers = flat.incoming.numbers[:, : len(residual)].float()
    scales = flat.incoming.scales[:, : len(residual), None]
    return _encoded((numbers * scales).sum(0).add_(residual), residual)


def _eager_dequantize(inputs: Inputs) -> None:
    flat = inputs.flat
    values = flat.result.numbers.float() * flat.result.scales[..., None]
    line = values.mul_(1.0).view(-1)
    sources = [
        line[offset : offset + grad.numel()].view(grad.shape)
        for offset, grad in zip(flat.layout.offsets, inputs.grads, strict=True)
    ]
    foreach_copy_(inputs.grads, sources)


def _copy(kernel: str) -> Callable[[Inputs], object]:
    def run(inputs: Inputs) -> None:
        half = nbytes(kernel, inputs.flat.message_layout, inputs.grads[0].dtype) // 2
        half += -half % _ALIGNED
        inputs.block[half : 2 * half].copy_(inputs.block[:half])

    return run


CONTENDERS = {
    kernel: (Contender(OURS, ours), Contender(EAGER, eager), Contender(CEILING, _copy(kernel)))
    for kernel, ours, eager in (
        ("quantize", _quantize, _eager_quantize),
        ("reduce_parts", _reduce_parts, _eager_reduce_parts),
        ("dequantize", _dequantize, _eager_dequantize),
    )
}


def check(inputs: Inputs) -> None:
    """That what ours sends and what it leaves out are together its input.

    Raises:
        RuntimeError: they are not.
    """
    flat = inputs.flat
    assert flat.residuals is not None
    flat.residuals.sent.zero_()
    _quantize(inputs)
    blocks = flat.message_layout.blocks
    numbers = flat.outgoing.numbers.reshape(-1, BLOCK)[:blocks].float()
    sums = numbers * flat.outgoing.scales.reshape(-1, 1)[:blocks] + flat.residuals.sent
    line = sums.view(-1)
    for grad, offset in zip(inputs.grads, flat.layout.offsets, strict=True):
        found, expected = line[offset : offset + grad.numel()], grad.reshape(-1).float()
        if not torch.allclose(found, expected / WORLD_SIZE, rtol=1e-5, atol=1e-6):
            raise RuntimeError("quantize loses what it neither sends nor leaves out")
