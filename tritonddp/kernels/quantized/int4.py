"""Two block numbers per byte, the first one in the lower half: see ``code.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write(codes, number, there):  # type: ignore[no-untyped-def]
    """Write numbers, fp32 ``(rows, 256)``, to ``codes``, in the rows marked by ``there``."""
    rows: tl.constexpr = number.shape[0]
    places = tl.arange(0, rows)[:, None] * 128 + tl.arange(0, 128)[None, :]
    lower, upper = tl.split(tl.reshape(number.to(tl.int32), (rows, 128, 2)))
    code = (lower & 15) | ((upper & 15) << 4)
    tl.store(codes + places, code.to(tl.uint8), mask=there[:, None])


@triton.jit
def read(codes, there, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers that :func:`write` has written; zero in other rows."""
    places = tl.arange(0, rows)[:, None] * 128 + tl.arange(0, 128)[None, :]
    code = tl.load(codes + places, mask=there[:, None], other=0).to(tl.int32)
    lower, upper = (code << 28) >> 28, (code << 24) >> 28  # sign-extend four bits
    return tl.reshape(tl.join(lower, upper), (rows, 256)).to(tl.float32)
