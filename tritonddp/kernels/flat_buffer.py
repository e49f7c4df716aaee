"""One flat buffer that carries all gradients of a bucket, and the trailer behind them.

::

    | grad 0 | grad 1 .. | pad | .. | grad n-1 | pad | flags | headers | marks | pad |
    |<----------------- payload ------------------->|<----------- trailer ---------->|

A *header* is a whole number from 0 to 255. Each rank fills places of its own and leaves zeros in
those of others, so that a sum over ranks hands everybody all headers, exactly in every wire dtype.
A *mark* says of one gradient on which ranks it is not finite: see :class:`Marks`.

Offsets and sizes are in elements of the buffer's dtype, the *wire* dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What gradients may be, and what may be on the wire, in any combination. (Complex gradients are
# real ones of another shape to the kernels.)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not smaller than ``value``."""
    return -(-value // multiple) * multiple


class Marks(NamedTuple):
    """Where a rank says that a gradient of its own is not finite: in a bit of its own.

    For each gradient there is one word for 8 ranks, a whole number from 0 to 255. No two ranks have
    the same bit, so that a sum over ranks is exact, like that of headers.
    """

    rank: int  # this one
    world_size: int

    @property
    def words(self) -> int:
        """Of each gradient."""
        return -(-self.world_size // 8)

    @property
    def word(self) -> int:
        """The one that has the bit of this rank."""
        return self.rank // 8

    @property
    def bit(self) -> int:
        """This rank's."""
        return 1 << self.rank % 8


class Squares:
    """Sums of squares of a bucket's gradients, which kernels leave here while they move them.

    Each a vector of partial sums on the gradients' device, in fp32 or fp64, in a fixed order, of
    which there are as many as the kernels like. A later launch may write to the same ones.

    Attributes:
        of_unflattened: :attr:`unflattened` is wanted.
        of_flattened: :attr:`flattened` is wanted on the CPU. (On a GPU it costs next to nothing.)
        flattened: of what was flattened, before it was scaled: by the first slot of each part.
        unflattened: of all gradients as ``unflatten`` has left them, also of those that it did not
            write to; ``None`` if it has not been called.
    """

    def __init__(self, of_unflattened: bool = True) -> None:
        self.of_unflattened = of_unflattened
        self.of_flattened = True
        self.flattened: dict[int, Tensor] = {}
        self.unflattened: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """Where each gradient lies in the flat buffer, and where the trailer begins.

    Strides are always dense: a gradient fills ``prod(shape)`` consecutive elements of the buffer in
    *memory* order.
    """

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]  # in elements
    numels: tuple[int, ...]  # of each gradient; 0 is allowed
    offsets: tuple[int, ...]  # first element of each gradient, a multiple of the alignment
    flags_offset: int  # first element of the trailer: that of the first flag
    headers: int  # number of headers, which follow the last flag; all ranks' together
    marks_offset: int  # first element behind the headers: that of the first mark
    numel: int  # length of the whole buffer, trailer included
    marks: Marks | None = None  # None if nobody looks whether gradients are finite

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]],
        alignment: int,
        headers: int = 0,
        marks: Marks | None = None,
    ) -> Layout:
        """Lay gradients of these shapes and dense strides out one behind the other.

        ``alignment`` is in elements: 16 lets the Triton kernels use 16-byte accesses for every
        wire dtype, 1 leaves no gaps.
        """
        numels, offsets, end = [], [], 0
        for shape in shapes:
            numels.append(prod(shape))
            offsets.append(end)
            end = round_up(end + numels[-1], alignment)
        marks_offset = end + len(numels) + headers
        words = 0 if marks is None else len(numels) * marks.words
        return cls(
            shapes=tuple(map(tuple, shapes)),
            strides=tuple(map(tuple, strides)),
            numels=tuple(numels),
            offsets=tuple(offsets),
            flags_offset=end,
            headers=headers,
            marks_offset=marks_offset,
            numel=round_up(marks_offset + words, alignment),
            marks=marks,
        )

    def part(self, first: int, last: int) -> Layout:
        """The layout of slots ``[first, last)`` alone, at the same places of the same buffer.

        Headers belong to the whole: a part has none.
        """
        return replace(
            self,
            shapes=self.shapes[first:last],
            strides=self.strides[first:last],
            numels=self.numels[first:last],
            offsets=self.offsets[first:last],
            flags_offset=self.flags_offset + first,
            headers=0,
            marks_offset=self.marks_offset + first * (self.marks.words if self.marks else 0),
        )

    def encode_headers(self, headers: Sequence[int]) -> bytes:
        """The headers, a byte each; ``bytes`` come back as they are, which costs nothing.

        Raises:
            ValueError: there are more or fewer than there is room for, or one is not in 0..255.
        """
        if len(headers) != self.headers:
            raise ValueError(
                f"the buffer has room for {self.headers} headers, but {len(headers)} came"
            )
        try:
            return bytes(headers)
        except ValueError:
            place, header = next((i, b) for i, b in enumerate(headers) if not 0 <= b <= 255)
            raise ValueError(f"header {place} should be in 0..255, but is {header}") from None

    @cached_property
    def gapless(self) -> tuple[int, int] | None:
        """First element and end of the gradients, if each begins where the one before it ends."""
        if not self.numels:
            return 0, 0
        ends = list(map(add, self.offsets, self.numels))
        return (self.offsets[0], ends[-1]) if list(self.offsets[1:]) == ends[:-1] else None

    @cached_property
    def mean_numel(self) -> float:
        """Average number of elements of a gradient."""
        return sum(self.numels) / max(1, len(self.numels))

    @cached_property
    def vectors(self) -> bool:
        """Whether all gradients are one-dimensional."""
        return all(len(shape) == 1 for shape in self.shapes)


class FlatBuffer:
    """The storage of one bucket: ``data`` is what the collective sends.

    Attributes:
        layout: see :class:`Layout`.
        dtype: of the views: that of ``data``, but for complex gradients.
        data: 1-D tensor of the wire dtype, ``layout.numel`` long. Gaps between gradients hold
            zeros and are never written, so that a sum over ranks keeps them zero.
        payload: view of ``data`` without the trailer.
        flags: view of the used flags, one element per gradient: 1 or 0 before the collective,
            afterwards the number of ranks that used the parameter (any non-zero value: the
            sum of many ones saturates in fp16 and bf16, but never becomes zero).
        headers: view of the headers, one element each: before the collective this rank's and
            zeros, afterwards all ranks'. Empty in a part.
        trailer: view of the used flags and the headers, without the marks. A part has none.
        encoded: what ``trailer`` is to be before the collective: ``encoded_flags`` and
            ``encoded_headers``. ``None`` before :meth:`encode_trailer`.
        marks: view of the marks, ``(n, words)``; without columns if there are none.
        views: one tensor per gradient in its place, with the gradient's own shape and strides.
        is_part: made by :meth:`part`; its flags are written with those of the whole.
        first_slot: of a part, among those of the whole.
        tables: of the kernels, made at their first launch.
        squares: where ``flatten`` and ``unflatten`` leave sums of squares, if they shall.
        known_flags: :attr:`flags` once reduced, empty if all are set; ``None`` if ``unflatten`` has
            to read them.
        batched: what the CPU's ``flatten`` has prepared, at its first call.
    """

    # Also of subclasses, which make the rest their own way.
    is_part = False
    first_slot = 0
    tables: Any = None
    encoded: Tensor | None = None
    encoded_flags: Sequence[bool] = ()
    encoded_headers: bytes = b""
    batched: Any = None
    squares: Squares | None = None
    known_flags: Sequence[float] | None = None

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        memory: Tensor | None = None,
    ) -> None:
        """In ``memory``, uint8 zeros ``(nbytes,)``, if that is given."""
        self.layout = layout
        self.dtype = dtype
        self.data = (
            torch.zeros(layout.numel, dtype=dtype, device=device)
            if memory is None
            else memory.view(dtype)
        )
        self.payload = self.data[: layout.flags_offset]
        # Made now: a view that comes later would look like somebody else's hold on the memory.
        self.trailer = self.data[layout.flags_offset : layout.marks_offset]
        self.flags = self.trailer[: len(layout.numels)]
        self.headers = self.trailer[len(layout.numels) :]
        words = 0 if layout.marks is None else layout.marks.words
        marks = self.data[layout.marks_offset :][: len(layout.numels) * words]
        self.marks = marks.view(len(layout.numels), words)
        self.views: list[Tensor] = list(map(self.tensor_at, range(len(layout.numels))))

    @property
    def memory(self) -> list[Tensor]:
        """All that collectives and kernels reach, but for their tables."""
        return [self.data]

    def tensor_at(self, slot: int) -> Tensor:
        """A new tensor in the place of gradient ``slot``, with a version counter of its own.

        (Views in autograd's sense share one: a write to any of them would look like one to all.)
        """
        layout, data = self.layout, self.data
        start = data.storage_offset() * data.element_size() // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=data.device).set_(
            data.untyped_storage(),
            start + layout.offsets[slot],
            layout.shapes[slot],
            layout.strides[slot],
        )

    def part(self, first: int, last: int) -> Any:
        """Slots ``[first, last)`` as a flat buffer of their own, in the same storage."""
        part = copy.copy(self)
        part.layout = self.layout.part(first, last)
        part.flags = self.flags[first:last]
        part.headers = self.headers[:0]
        part.marks = self.marks[first:last]
        part.views = self.views[first:last]
        part.is_part, part.first_slot = True, first
        part.tables = part.batched = None
        return part

    def write_trailer(self, used: Sequence[bool], headers: Sequence[int]) -> None:
        """Write the used flags, one a gradient, and the headers: see :meth:`encode_trailer`."""
        if (
            self.encoded is None
            or used != self.encoded_flags
            or (headers or b"") != self.encoded_headers
        ):
            self.encode_trailer(used, headers)
        self.trailer.copy_(self.encoded)  # type: ignore[arg-type]

    def encode_trailer(self, used: Sequence[bool], headers: Sequence[int]) -> None:
        """Bring :attr:`encoded` up to date: in most steps it need not be made again.

        Raises:
            ValueError: there is not one flag per gradient; or see :meth:`Layout.encode_headers`.
        """
        own_headers = self.layout.encode_headers(headers)
        slots = len(self.layout.numels)
        if len(used) != slots:
            raise ValueError(f"the buffer has {slots} slots, but {len(used)} flags came")
        # Bytes, since torch.tensor takes 0.1 us a flag; a bytearray, since torch warns of memory
        # that must not be written. (Nor does it take one without bytes.)
        content = bytearray(used) + own_headers
        encoded = torch.empty_like(self.trailer)
        if content:
            encoded.copy_(torch.frombuffer(content, dtype=torch.uint8))
        self.encoded = None  # or what it is of would not be, if this broke off here
        # A list of its own: owners change theirs in place.
        self.encoded_flags, self.encoded_headers = list(used), own_headers
        self.encoded = encoded

    @cached_property
    def trailer_nbytes(self) -> int:
        """Bytes of :attr:`trailer`."""
        return self.trailer.numel() * self.trailer.element_size()

    @cached_property
    def flags_nbytes(self) -> int:
        """Bytes of :attr:`flags`."""
        return self.flags.numel() * self.flags.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes that a reduction hands to collectives: payload and trailer."""
        return self.data.nbytes

    def fill_nan(self) -> None:
        """Make NaN of all gradients."""
        self.payload.fill_(torch.nan)
        self.clear_marks()  # those of other ranks are of the last reduction
        self.mark(slice(None))

    def clear_marks(self) -> None:
        """No gradient of this buffer, or part of one, is known not to be finite."""
        self.marks.zero_()

    def mark(self, slots: int | slice) -> None:
        """Say that the gradients of these slots are not finite on this rank, if anybody asks."""
        if self.layout.marks is not None:
            self.marks[slots, self.layout.marks.word] = self.layout.marks.bit

    def marked(self, marks: Tensor | None = None) -> dict[int, list[int]]:
        """Once reduced: the slots whose gradients are not finite, and on which ranks.

        Args:
            marks: :attr:`marks`, on the host, where somebody has read them.
        """
        marks = self.marks if marks is None else marks
        if not marks.any():
            return {}
        rows = marks.to(torch.int64).tolist()
        return {slot: self._ranks_of(row) for slot, row in enumerate(rows) if any(row)}

    def _ranks_of(self, row: list[int]) -> list[int]:
        """Those whose marks are in the words of one gradient."""
        return [rank for rank in range(8 * len(row)) if row[rank // 8] >> rank % 8 & 1]

    def check_factor(self, factor: Tensor) -> None:
        """Raise a TypeError if it is not a tensor of one fp64 element on the buffer's device."""
        if (
            factor.dtype is not torch.float64
            or factor.numel() != 1
            or factor.device != self.data.device
        ):
            raise TypeError(
                f"the factor should be one torch.float64 element on {self.data.device}, but is "
                f"{factor.dtype} of shape {tuple(factor.shape)} on {factor.device}"
            )
