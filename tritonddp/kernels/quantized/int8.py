"""Block numbers as bytes, on the device: see ``code.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write(codes, number, there):  # type: ignore[no-untyped-def]
    """Write numbers, fp32 ``(rows, 256)``, to ``codes``, in the rows marked by ``there``."""
    rows: tl.constexpr = number.shape[0]
    places = tl.arange(0, rows)[:, None] * 256 + tl.arange(0, 256)[None, :]
    tl.store(codes + places, number.to(tl.int8).to(tl.uint8, bitcast=True), mask=there[:, None])


@triton.jit
def read(codes, there, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers that :func:`write` has written; zero in other rows."""
    places = tl.arange(0, rows)[:, None] * 256 + tl.arange(0, 256)[None, :]
    code = tl.load(codes + places, mask=there[:, None], other=0)
    return code.to(tl.int8, bitcast=True).to(tl.float32)
