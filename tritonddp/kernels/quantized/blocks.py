"""Blocks of 256 numbers of 8 bits and a scale, on the device: what the quantising kernels share.

What the numbers are is said in ``reference.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonddp.kernels.flatten import INTERPRETED

# Fp8 by integer operations, not by the hardware's conversions. The interpreter's are wrong by up to
# a factor of two, and AMD's are of another format (fnuz) before gfx950.
BY_BITS = INTERPRETED or torch.version.hip is not None


@triton.jit
def to_fp8(x, BY_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of ``x``, fp32 within the limits, as e4m3: to the nearest, of two the even one."""
    if not BY_BITS:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Round off 20 bits of the fraction; a carry goes into the exponent, whose bias then is 7
        # instead of 127. Below 2**-6 steps are 2**-9: an addition makes them those of the fraction.
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
        # Exponent and fraction in the place of those of fp32, whose bias is larger by 120. The
        # sign comes in later: the interpreter would lose that of a zero.
        magnitude = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        bits = magnitude.to(tl.uint32, bitcast=True) | ((wide & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_fp8(x):  # type: ignore[no-untyped-def]
    """``from_fp8(to_fp8(x))``, but for the sign of a zero, without making the bytes.

    What `cvt` has made must not be converted back in the same kernel: the ptxas of Triton (12.8 in
    3.7.1) merges pairs of bytes into the word that is stored, and then unpacks a register that no
    byte was ever written to. (In the results of 3.6 on an H100, and in the code that 3.7.1 makes.)
    """
    bits = x.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20
    # Below 2**-6 steps are 2**-9: the sum has no bits for less.
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
    """Numbers, as bytes, and scales of blocks: fp32 ``(rows, 256)`` to that and ``(rows,)``.

    And the numbers once more in fp32, for :func:`error_of`. Magnitudes are compared as integers,
    which puts NaN above infinity and that above the others.
    """
    limit: tl.constexpr = 448.0 if FP8 else 127.0
    top = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = top < 0x7F800000
    # True division: the other one is not rounded as that of the CPU is.
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
        # The sum has no bits for a fraction: rounded to the nearest, of two to the even one.
        number = (number + 12582912.0) - 12582912.0
        code = number.to(tl.int8).to(tl.uint8, bitcast=True)
    return code, tl.where(finite, scale, float("nan")), number


@triton.jit
def error_of(v, number, scale, before):  # type: ignore[no-untyped-def]
    """What ``encode`` has left out of ``v``; where a block became NaN, what it was ``before``."""
    # No zero is negative, as in the twin.
    error = (v - number * scale[:, None]) + 0.0
    return tl.where((scale == scale)[:, None], error, before)
