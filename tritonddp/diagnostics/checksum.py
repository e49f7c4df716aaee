"""Checksums of the bits of tensors, made on their device in a few launches for all of them.

Each word of 8 bytes is mixed with its index by the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), and the results are summed modulo
2^64. So the order in which a device sums does not matter. The mixing of a word is a bijection: a
change of one word always changes the sum. Other changes, such as swapped elements, are missed in
one case of 2^64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Words in one launch: 8 MiB. A few temporary copies of them are made.
_WORDS = 2**20
_WORD = 8  # bytes

# The constants of SplitMix64, as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64

Piece = tuple[int, int, Tensor]  # index of the tensor, index of the first word, bytes


@torch.no_grad()
def checksums(tensors: Sequence[Tensor | None]) -> list[int]:
    """Checksums of tensors: one signed 64-bit number for each.

    It depends on content, shape, dtype and layout (dense or sparse), not on strides. Bits are
    compared: a NaN equals the same NaN, and 0.0 differs from -0.0. ``None`` has a checksum too. The
    host waits for the device once.

    Memory: a small multiple of 8 MiB, and a copy of a tensor that is not row-major (of large
    ones one at a time).
    """
    totals = [0 if tensor is None else _described(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            by_device.setdefault(tensor.device, []).append(number)
    for device, numbers in by_device.items():
        ramp = torch.arange(_WORDS, device=device).mul_(_GAMMA)
        owners: list[tuple[int, int]] = []
        sums = []
        for batch in _batches(_pieces(tensors, numbers)):
            sums.append(_sums([piece for _, _, piece in batch], ramp))
            owners += [(number, first) for number, first, _ in batch]
        if not sums:
            continue
        found, firsts = torch.cat(sums), torch.tensor([first for _, first in owners], device=device)
        # (A large tensor is always cut at the same places.)
        found = found.where(firsts == 0, _mix(found + firsts * _GAMMA))
        for (number, _), total in zip(owners, found.tolist(), strict=True):
            totals[number] += total
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


def _described(tensor: Tensor) -> int:
    kind = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout}"
    return int.from_bytes(hashlib.sha256(kind.encode()).digest()[:8], "little")


def _pieces(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> Iterator[Piece]:
    for number in numbers:
        tensor = tensors[number]
        assert tensor is not None
        parts = [tensor.detach()]
        if tensor.layout is torch.sparse_coo:
            rows = parts[0].coalesce()
            parts = [rows.indices(), rows.values()]
        first = 0
        for part in parts:
            row = part.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            for piece in row.split(_WORDS * _WORD) if row.numel() else ():
                yield number, first, piece
                first += _WORDS
            del row


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """The pieces of each launch: at most as many words as the ramp has."""
    batch: list[Piece] = []
    words = 0
    for piece in pieces:
        more = -(-piece[2].numel() // _WORD)
        if words + more > _WORDS:
            yield batch
            batch, words = [], 0
        batch.append(piece)
        words += more
    if batch:
        yield batch


def _sums(pieces: Sequence[Tensor], ramp: Tensor) -> Tensor:
    """For each piece, the sum of its words, each mixed with its index.

    Pieces are bytes; the last word is padded with zeros. ``ramp`` is index times ``_GAMMA``.
    """
    padding = torch.zeros(_WORD, dtype=torch.uint8, device=ramp.device)
    padded = [part for piece in pieces for part in (piece, padding[: -piece.numel() % _WORD])]
    words = torch.cat(padded).view(torch.int64)
    sizes = [-(-piece.numel() // _WORD) for piece in pieces]
    words += torch.cat([ramp[:size] for size in sizes])
    _mix(words)
    ends = torch.tensor(sizes, device=words.device).cumsum(0).sub_(1)
    up_to = words.cumsum_(0)[ends]
    return torch.cat([up_to[:1], up_to.diff()])


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    words ^= _shifted(words, 30)
    words *= _FIRST
    words ^= _shifted(words, 27)
    words *= _SECOND
    words ^= _shifted(words, 31)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: filled with zeros, also where the sign bit is set."""
    return (words >> bits).bitwise_and_(2 ** (64 - bits) - 1)
