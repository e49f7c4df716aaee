"""A flat buffer that is sent quantized, in blocks, and the layout of its message.

A *block* is 256 consecutive elements, in memory order, of one gradient: 256 numbers, in a code of C
bytes (``code.py``; 256 in int8), and one fp32 scale. Each gradient starts a new block, so that its
quantization does not depend on its bucket. *Exact* gradients are sent in fp32 in the same message.

Each of W ranks owns one part of the blocks, and of the exact elements: it gets that part from all
ranks, sums it, and sends the sum to all ranks. So the message of a rank has W equal parts::

    part p      | numbers: C Bp bytes | scales: 4 Bp, pad to 16 | exact: 4 Ep | trailer, pad |
    trailer     | flag 0 .. flag n-1 | this rank's header |  (a byte each)

    Bp = ceil(blocks / W)        Ep = ceil(exact elements / W), up to a multiple of 16

The sums that each rank sends afterwards form such a part without the trailer. The trailer is the
same in each part, so that every rank gets the trailers of all ranks. Padding has no meaning.

Two ranks may instead send each other their whole message, which is the same number of bytes, and
both sum all of it. The CPU does so, since it saves half of the work. Such an exchange is *direct*,
and its message has one part.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tritonddp.kernels.flat_buffer import FlatBuffer, Layout, round_up
from tritonddp.kernels.quantized.code import BLOCK, INT8, BlockCode

# Alignment in elements of exact gradients, and of the parts of them that ranks own, so that the
# kernels can use 16-byte accesses for gradients of any dtype.
EXACT_ALIGNMENT = 16

# The used flag of a gradient that is not finite; other flags are 0 and 1.
_NOT_FINITE = 255


class Piece(NamedTuple):
    """Consecutive elements of one gradient in one part of the message."""

    slot: int
    start: int  # element of the gradient, in memory order: a multiple of 256, or of 16 if exact
    numel: int  # at least 1
    part: int
    place: int  # index of its first block in the part, or of its first exact element


class Fragment(NamedTuple):
    """Consecutive elements of one slot of a bucket in one share of its flat buffer."""

    slot: int  # slot index; the number of slots stands for the trailer
    start: int  # element of the slot, in memory order: a multiple of 256 if it is quantized
    numel: int  # at least 1
    offset: int  # in the flat buffer


def fragments_of(layout: Layout, first: int, last: int) -> list[Fragment]:
    """Return the fragments in elements ``[first, last)`` of a flat buffer."""
    starts = [*layout.offsets, layout.flags_offset]
    numels = [*layout.numels, layout.numel - layout.flags_offset]
    found = []
    for slot, (offset, numel) in enumerate(zip(starts, numels, strict=True)):
        begin, end = max(first, offset), min(last, offset + numel)
        if begin < end:
            found.append(Fragment(slot, begin - offset, end - begin, begin))
    return found


class MessageLayout:
    """Position of each gradient in the message.

    Attributes:
        quantized: for each gradient, whether it is quantized; otherwise it is exact.
        is_direct: each rank gets the whole message of the other, and sums are not sent.
        places: for a quantized gradient the index of its first block, for an exact one the
            index of its first element among all exact elements.
        blocks, exact: blocks, and exact elements with padding, of all gradients.
        part_blocks, part_exact: the same in a part (``Bp`` and ``Ep``).
        scales_offset, exact_offset: offset in a part, in bytes.
        part_bytes: bytes of a part without its trailer, which is the offset of the trailer.
        stride: bytes from one part to the next in a rank's message of ``parts`` parts.
        gathered_numel: bytes of the sums of all ranks.
    """

    def __init__(
        self,
        numels: Sequence[int],
        quantized: Sequence[bool],
        world_size: int,
        headers: int = 0,
        is_direct: bool = False,
        code: BlockCode = INT8,
    ) -> None:
        """Create the layout for these gradients, and ``headers`` bytes for all ranks."""
        self.numels = tuple(numels)  # of each gradient
        self.quantized = tuple(quantized)
        self.world_size = world_size
        self.is_direct = is_direct
        self.parts = parts = 1 if is_direct else world_size  # in a message
        self.header = headers // world_size  # bytes per rank
        self.places: list[int] = []
        self.blocks = self.exact = 0
        for numel, is_quantized in zip(numels, quantized, strict=True):
            if is_quantized:
                self.places.append(self.blocks)
                self.blocks += -(-numel // BLOCK)
            else:
                self.places.append(self.exact)
                self.exact += round_up(numel, EXACT_ALIGNMENT)
        self.part_blocks = -(-self.blocks // parts)
        self.part_exact = round_up(-(-self.exact // parts), EXACT_ALIGNMENT)
        self.code = code  # code of the blocks
        self.scales_offset = self.part_blocks * code.nbytes
        self.exact_offset = self.scales_offset + round_up(4 * self.part_blocks, 16)
        self.part_bytes = self.exact_offset + 4 * self.part_exact
        self.stride = round_up(self.part_bytes + len(numels) + self.header, 16)
        self.gathered_numel = 0 if is_direct else world_size * self.part_bytes

    def owned_blocks(self, rank: int) -> int:
        """Return the number of blocks that ``rank`` owns; the last ranks may own fewer."""
        if self.is_direct:
            return 0
        return min(max(self.blocks - rank * self.part_blocks, 0), self.part_blocks)

    def pieces(self, first: int, last: int, most: int = sys.maxsize) -> Iterator[Piece]:
        """Yield the pieces of slots ``[first, last)``, in slot order, then by element.

        No piece has more than ``most`` elements, a multiple of 256.
        """
        for slot in range(first, last):
            quantized, numel, place = self.quantized[slot], self.numels[slot], self.places[slot]
            per_part = self.part_blocks if quantized else self.part_exact
            size = BLOCK if quantized else 1  # elements per unit of place
            start = 0
            while start < numel:
                part, at = divmod(place + start // size, per_part)
                count = min(numel - start, (per_part - at) * size, most)
                yield Piece(slot, start, count, part, at)
                start += count


class Sections(NamedTuple):
    """Views of some parts of a message, one row per part."""

    numbers: Tensor  # (rows, Bp, C), of the code's dtype
    scales: Tensor  # (rows, Bp), fp32. NaN makes the block all NaN, 0 all zeros
    exact: Tensor  # (rows, Ep), fp32
    trailers: Tensor  # (rows, n + bytes of a header), uint8; no columns in gathered sums


@dataclass
class Residuals:
    """Quantization errors so far, to be added to later gradients (error feedback).

    They are in the unit of the sent gradients, which are scaled. Residuals belong to the bucket, so
    they survive a replacement of its buffers.
    """

    sent: Tensor | None  # (blocks, 256), fp32: of this rank's gradients; None: not kept
    reduced: Tensor  # (owned blocks, 256), fp32: of the sums that this rank sends to all ranks

    @classmethod
    def zeros(
        cls, message: MessageLayout, rank: int, device: torch.device, sums_only: bool = False
    ) -> Residuals:
        """Return initial residuals; with ``sums_only``, only for the sums."""
        sent, reduced = (
            torch.zeros(count, BLOCK, dtype=torch.float32, device=device)
            for count in (0 if sums_only else message.blocks, message.owned_blocks(rank))
        )
        return cls(None if sums_only else sent, reduced)


@dataclass
class Quantization:
    """The quantization of the gradients of one bucket.

    Normally each rank quantizes its gradients. If several hosts have several ranks each, a rank
    quantizes the sum over its host of one *share* of the bucket.
    """

    message: MessageLayout  # its slots are the slots of the bucket, or the fragments of the share
    rank: int  # index of this rank among the ranks that exchange messages
    residuals: Residuals | None  # None without error feedback
    unit: float | None = None  # unit of weights of the residuals, when known: see rescale()
    share: Sequence[Fragment] | None = None
    # By slot of the bucket: residuals of blocks that other ranks of the host now quantize. They are
    # added to this rank's next gradient.
    unsent: dict[int, Tensor] = field(default_factory=dict)

    @property
    def fragments(self) -> Iterator[tuple[int, Fragment]]:
        """The quantized fragments, each with its place in the message."""
        message = self.message
        for at, (numel, place) in enumerate(zip(message.numels, message.places, strict=True)):
            if message.quantized[at]:
                yield place, Fragment(at, 0, numel, 0) if self.share is None else self.share[at]

    def rescale(self, unit: float) -> None:
        """Convert the residuals to ``unit``, by which weights are divided from now on."""
        before, self.unit = self.unit, unit
        if before not in (unit, None) and self.residuals is not None:
            for each in (self.residuals.sent, self.residuals.reduced, *self.unsent.values()):
                if each is not None:
                    each.mul_(before / unit)


class QuantizedBuffer(FlatBuffer):
    """A flat buffer of fp32 whose gradients are sent and received in quantized messages.

    ``quantize`` fills ``message``. An all-to-all fills ``received``: its row r comes from rank r,
    and holds the part that this rank owns. ``reduce_parts`` sums the rows into the first one
    (``reduced``), and reads the trailers. An all-gather of ``reduced`` fills ``gathered``, from
    which ``dequantize`` writes the gradients.

    Memory: on a GPU twice the message, in int8 about two bytes per element. On the CPU three times
    the message, or twice in a direct exchange, where ``message`` is this rank's row of
    ``received``. In addition on the CPU ``data``, in which the mean is computed.

    The quantization belongs to the bucket; its rank and residuals are also attributes here. A share
    has no flags that tell which residuals to send, so the residuals of a block whose values are all
    zero are not sent. The offsets of the layout are recomputed.

    Attributes:
        message: uint8: the message of this rank.
        received: uint8, the parts from all ranks, one row each.
        gathered: uint8, the sums of all ranks. On a GPU it is the beginning of ``message``,
            which has been sent by then. On the CPU it is separate: other ranks may send sums
            earlier.
        reduced: uint8, the beginning of ``received``: the sums that this rank owns.
        outgoing, incoming, result: sections of ``message``, ``received`` and ``gathered``.
        data: fp32, one gradient after the other, quantized ones first, each at a multiple of
            256. Elements between them have no meaning. On a GPU it is the message.
        flags, headers: fp32, valid after ``reduce_parts``.
    """

    def __init__(
        self, quantization: Quantization, layout: Layout, dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype is not torch.float32:
            raise ValueError(f"a quantized buffer needs dtype torch.float32, not {dtype}")
        slots = len(layout.numels)
        self.message_layout = message = quantization.message
        of_blocks = message.blocks * BLOCK
        end = of_blocks + message.exact
        offsets = tuple(
            place * BLOCK if is_quantized else of_blocks + place
            for place, is_quantized in zip(message.places, message.quantized, strict=True)
        )
        self.layout = replace(layout, offsets=offsets, flags_offset=end, numel=end)
        self.dtype = dtype
        self.rank = quantization.rank
        self.residuals = quantization.residuals
        self.is_share = quantization.share is not None
        received = message.world_size * message.stride
        self.received = torch.zeros(received, dtype=torch.uint8, device=device)
        if message.is_direct:
            self.message = self.received.view(message.world_size, -1)[self.rank]
        else:
            self.message = torch.zeros_like(self.received)
        self.gathered = self.message[: message.gathered_numel]
        if device.type == "cpu":
            self.gathered = torch.zeros_like(self.gathered)
        self.reduced = self.received[: message.part_bytes]
        self.outgoing = self._sections(self.message, message.parts)
        self.incoming = self._sections(self.received)
        self.result = self.incoming if message.is_direct else self._sections(self.gathered)
        trailer = torch.zeros(slots + layout.headers, dtype=dtype, device=device)
        self.flags = trailer[:slots]
        self.headers = trailer[slots:]
        self.views: list[Tensor] = []  # on the CPU only
        self.addresses = array("q")
        self.data = self.message
        if device.type == "cpu":
            self.data = torch.zeros(self.layout.numel, dtype=dtype, device=device)
            self.views = list(map(self.tensor_at, range(slots)))
        self.payload = self.data

    def _sections(self, parts: Tensor, size: int = 0) -> Sections:
        layout = self.message_layout
        size, blocks = size or layout.world_size, layout.part_blocks
        rows = parts.view(size, parts.numel() // size)
        words = parts.view(torch.float32).view(size, rows.shape[1] // 4)
        scales, exact = layout.scales_offset // 4, layout.exact_offset // 4
        numbers = rows[:, : layout.scales_offset]
        return Sections(
            numbers.view(layout.code.dtype).view(size, blocks, layout.code.nbytes),
            words[:, scales : scales + blocks],
            words[:, exact : exact + layout.part_exact],
            rows[:, layout.part_bytes :][:, : len(layout.numels) + layout.header],
        )

    def write_trailer(self, used: Sequence[bool], headers: Sequence[int]) -> None:
        """See :meth:`FlatBuffer.write_trailer`. Only the header of this rank is sent."""
        size = self.message_layout.header
        own_header = self.layout.encode_headers(headers)[self.rank * size :][:size]
        trailer = bytearray(map(bool, used)) + own_header
        if trailer:
            self.outgoing.trailers.copy_(torch.frombuffer(trailer, dtype=torch.uint8))

    def own_header(self, rank: int, world_size: int) -> Tensor:
        """See :meth:`FlatBuffer.own_header`. Each part has a copy."""
        return self.outgoing.trailers[:, len(self.flags) :]

    @property
    def memory(self) -> list[Tensor]:
        kept = [each for each in (self.left_out, self.sums_left_out) if each is not None]
        return [self.data, self.message, self.received, self.gathered, self.flags, *kept]

    @property
    def left_out(self) -> Tensor | None:
        """Residuals of this rank's gradients."""
        return None if self.residuals is None else self.residuals.sent

    @property
    def sums_left_out(self) -> Tensor | None:
        """Residuals of the sums that this rank sends."""
        return None if self.residuals is None else self.residuals.reduced

    @property
    def nbytes(self) -> int:
        """See :attr:`FlatBuffer.nbytes`: the bytes of both collectives."""
        return self.received.numel() + self.gathered.numel()

    def fill_nan(self) -> None:
        """See :meth:`FlatBuffer.fill_nan`. Residuals do not change."""
        self.outgoing.scales.fill_(torch.nan)
        self.outgoing.exact.fill_(torch.nan)

    def note_not_finite(self, which: Tensor, rank: int, world_size: int) -> None:
        """See :meth:`FlatBuffer.note_not_finite`. All ranks get the flags of each rank."""
        self.outgoing.trailers[:, : len(which)].masked_fill_(which, _NOT_FINITE)

    def not_finite(self, world_size: int) -> tuple[Tensor, Tensor]:
        noted = self.incoming.trailers[:, : len(self.flags)] == _NOT_FINITE
        return noted.any(0), noted.any(1)
