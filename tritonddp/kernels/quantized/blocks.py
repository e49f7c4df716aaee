"""Blocks of 256 8-bit numbers and a scale, on the device: functions that several kernels use.

The format is described in ``reference.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonddp.kernels.flatten import INTERPRETED

# Convert fp8 by integer operations, not by conversion instructions. Those of the interpreter are
# wrong by up to a factor of two, and those of AMD before gfx950 have another format (fnuz).
BY_BITS = INTERPRETED or torch.version.hip is not None


@triton.jit
def to_fp8(x, BY_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of ``x``, fp32 within the limits, as e4m3, rounded to nearest even."""
    if not BY_BITS:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Round off 20 bits of the fraction; a carry goes into the exponent. Then change the bias of
        # the exponent from 127 to 7. Below 2**-6 the step of e4m3 is 2**-9: after an addition of a
        # large number, the last bit of the fp32 fraction has that step.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        steps = magnitude.to(tl.float32, bitcast=True) * 512.0 + 12582912.0
        subnormal = steps.to(tl.uint32, bitcast=True) & 0xFF
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_fp8(code, BY_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of :func:`to_fp8`, exact."""
    if not BY_BITS:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.uint32)
        # Move exponent and fraction to their place in fp32, whose bias is larger by 120. The sign
        # is added later: the interpreter would lose the sign of a zero.
        magnitude = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        bits = magnitude.to(tl.uint32, bitcast=True) | ((wide & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_fp8(x):  # type: ignore[no-untyped-def]
    """``from_fp8(to_fp8(x))``, except for the sign of a zero, without making the bytes.

    A result of `cvt` must not be converted back in the same kernel: the ptxas of Triton (12.8 in
    3.7.1) merges pairs of bytes into the word that is stored, and then reads a register to which no
    byte was written. (Seen in results of 3.6 on an H100, and in the code that 3.7.1 generates.)
    """
    bits = x.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20
    # Below 2**-6 the step is 2**-9: the sum has no bits for smaller steps.
    subnormal = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal.to(tl.float32, bitcast=True))


@triton.jit
def decode(code, scale, FP8: tl.constexpr, BY_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``number * scale`` of blocks, ``(rows, 256)`` and ``(rows,)``, in fp32."""
    if FP8:
        return from_fp8(code, BY_BITS) * scale[:, None]
    else:
        return code.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]


@triton.jit
def encode(v, FP8: tl.constexpr, BY_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantise blocks, fp32 ``(rows, 256)``.

    Returns the numbers as bytes ``(rows, 256)``, the scales ``(rows,)``, and the numbers in fp32
    for :func:`error_of`. Magnitudes are compared as integers, so that NaN is larger than infinity,
    which is larger than all other values.
    """
    limit: tl.constexpr = 448.0 if FP8 else 127.0
    top = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = top < 0x7F800000
    # div_rn is rounded like the division of the CPU; ``/`` is not.
    scale = tl.math.div_rn(tl.where(finite, top, 0).to(tl.float32, bitcast=True), limit)
    scale = (scale.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    divisor = tl.where(scale > 0.0, scale, 1.0)[:, None]
    number = tl.math.div_rn(v, tl.broadcast_to(divisor, v.shape))
    number = tl.where(finite[:, None], number, 0.0)
    if FP8:
        code = to_fp8(number, BY_BITS)
        number = rounded_to_fp8(number)
    else:
        # The sum has no bits for a fraction: it is rounded to nearest even.
        number = (number + 12582912.0) - 12582912.0
        code = number.to(tl.int8).to(tl.uint8, bitcast=True)
    return code, tl.where(finite, scale, float("nan")), number


@triton.jit
def error_of(v, number, scale):  # type: ignore[no-untyped-def]
    """The quantisation error of ``encode``; meaningless for a block that became NaN."""
    # + 0.0: no zero is negative, as in reference.py.
    return (v - number * scale[:, None]) + 0.0
