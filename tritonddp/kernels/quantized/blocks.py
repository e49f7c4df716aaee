"""Blocks of 256 numbers and a scale, on the device: functions that several kernels use.

``reference.py`` describes the format; ``code.py`` describes how numbers become bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode(v, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize blocks, fp32 ``(rows, 256)``.

    Return the numbers in fp32 ``(rows, 256)``, and the scales ``(rows,)``. Magnitudes are compared
    as integers, so that NaN is larger than infinity, which is larger than all other values.
    """
    top = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = top < 0x7F800000
    # div_rn rounds like the division of the CPU; ``/`` does not.
    scale = tl.math.div_rn(tl.where(finite, top, 0).to(tl.float32, bitcast=True), LIMIT)
    scale = (scale.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    divisor = tl.where(scale > 0.0, scale, 1.0)[:, None]
    number = tl.math.div_rn(v, tl.broadcast_to(divisor, v.shape))
    number = tl.where(finite[:, None], number, 0.0)
    # The sum has no bits for a fraction, so it is rounded to nearest even.
    number = (number + 12582912.0) - 12582912.0
    return number, tl.where(finite, scale, float("nan"))


@triton.jit
def error_of(v, number, scale):  # type: ignore[no-untyped-def]
    """Return the quantization error of ``encode``; meaningless for a block that became NaN."""
    # Adding 0.0 turns negative zeros into positive ones, as in reference.py.
    return (v - number * scale[:, None]) + 0.0
