"""Checksums of the bits of tensors, computed on their device.

Each word of 8 bytes is mixed with its index by the finalizer of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), and the results are summed modulo
2^64. The order in which a device sums therefore does not matter. The mixing of a word is a
bijection, so a change of one word always changes the sum. Other changes, such as swapped elements,
are missed with probability 2^-64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

# Bytes that are mixed in one step, which needs a few temporary copies of them.
_PIECE = 2**23
_WORD = 8  # bytes

# The constants of SplitMix64, as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


@torch.no_grad()
def checksums(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return a checksum of each tensor, a signed 64-bit number.

    It depends on content, shape, dtype and layout (dense or sparse), not on strides. Bits are
    compared: a NaN equals the same NaN, and 0.0 differs from -0.0. ``None`` has a checksum too. The
    host waits for each device once.

    Memory: a small multiple of 8 MiB, and a copy of each tensor that is not row-major.
    """
    totals = [0 if tensor is None else _described(tensor) for tensor in tensors]
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            by_device.setdefault(tensor.device, {})[number] = _sum_of_words(tensor)
    for sums in by_device.values():
        for number, total in zip(sums, torch.stack([*sums.values()]).tolist(), strict=True):
            totals[number] += total
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


def _described(tensor: Tensor) -> int:
    kind = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout}"
    return int.from_bytes(hashlib.sha256(kind.encode()).digest()[:8], "little")


def _sum_of_words(tensor: Tensor) -> Tensor:
    """Return the sum of the words, each mixed with its index: int64 ``()``."""
    parts = [tensor.detach()]
    if tensor.layout is torch.sparse_coo:
        rows = parts[0].coalesce()
        parts = [rows.indices(), rows.values()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    first = 0
    for part in parts:
        row = part.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for piece in row.split(_PIECE) if row.numel() else ():
            words = pad(piece, (0, -piece.numel() % _WORD)).view(torch.int64)  # a copy
            last = first + len(words)
            words += torch.arange(first, last, device=words.device).mul_(_GAMMA)
            total += _mix(words).sum()
            first = last
    return total


def _mix(words: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer in place."""
    words ^= _shifted(words, 30)
    words *= _FIRST
    words ^= _shifted(words, 27)
    words *= _SECOND
    words ^= _shifted(words, 31)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right logically: fill with zeros, even if the sign bit is set."""
    return (words >> bits).bitwise_and_(2 ** (64 - bits) - 1)
