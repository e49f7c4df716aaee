"""One flat buffer that holds all gradients of a bucket, and the trailer after them.

::

    | grad 0 | grad 1 .. | pad | .. | grad n-1 | pad | flags | headers | pad |
    |<----------------- payload ------------------->|<------- trailer ------>|

A *header* here is an integer from 0 to 255. Each rank writes its headers to separate places, and
zeros to the places of the other ranks. So a sum over ranks gives all headers to all ranks, exactly
in every wire dtype. A flag that is NaN on one rank is NaN on all ranks: the gradient is not finite
there.

Offsets and sizes are in elements of the buffer's dtype, the *wire* dtype.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Sequence
from ctypes import string_at
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Supported dtypes of gradients and wire dtypes, in any combination. Kernels treat a complex
# gradient as a real one with another shape.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not smaller than ``value``."""
    return -(-value // multiple) * multiple


def shared(values: Iterable[T]) -> list[T]:
    """Return the values, with equal values replaced by the same object.

    The shapes and strides of a model with 100,000 small parameters take more memory than its
    gradients.
    """
    known: dict[T, T] = {}
    return [known.setdefault(value, value) for value in values]


@dataclass(frozen=True)
class Layout:
    """Position of each gradient in the flat buffer, and of the trailer.

    Strides are always dense: a gradient fills ``prod(shape)`` consecutive elements of the buffer in
    *memory* order.
    """

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]  # in elements
    numels: tuple[int, ...]  # elements of each gradient; 0 is allowed
    offsets: tuple[int, ...]  # first element of each gradient, a multiple of the alignment
    flags_offset: int  # first element of the trailer, which is the first flag
    headers: int  # number of headers of all ranks; they follow the last flag
    numel: int  # length of the whole buffer, including the trailer

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]],
        alignment: int,
        headers: int = 0,
    ) -> Layout:
        """Create a layout of gradients with these shapes and dense strides, one after the other.

        ``alignment`` is in elements: 16 lets the Triton kernels use 16-byte accesses for every
        wire dtype, 1 leaves no gaps.
        """
        numels, offsets, end = [], [], 0
        for shape in shapes:
            numels.append(prod(shape))
            offsets.append(end)
            end = round_up(end + numels[-1], alignment)
        return cls(
            shapes=tuple(map(tuple, shapes)),
            strides=tuple(map(tuple, strides)),
            numels=tuple(numels),
            offsets=tuple(offsets),
            flags_offset=end,
            headers=headers,
            numel=round_up(end + len(numels) + headers, alignment),
        )

    def part(self, first: int, last: int) -> Layout:
        """Return the layout of slots ``[first, last)``, at the same places of the same buffer.

        Headers belong to the whole buffer: a part has none.
        """
        return replace(
            self,
            shapes=self.shapes[first:last],
            strides=self.strides[first:last],
            numels=self.numels[first:last],
            offsets=self.offsets[first:last],
            flags_offset=self.flags_offset + first,
            headers=0,
        )

    def encode_headers(self, headers: Sequence[int]) -> bytes:
        """Return the headers, one byte each; ``bytes`` are returned unchanged, without cost.

        Raises:
            ValueError: their number does not match the layout, or a header is not in 0..255.
        """
        if len(headers) != self.headers:
            raise ValueError(
                f"the buffer has room for {self.headers} headers, but got {len(headers)}"
            )
        try:
            return bytes(headers)
        except ValueError:
            place, header = next((i, b) for i, b in enumerate(headers) if not 0 <= b <= 255)
            raise ValueError(f"header {place} should be in 0..255, but is {header}") from None

    @property
    def trailer_end(self) -> int:
        """First element after the trailer."""
        return self.flags_offset + len(self.numels) + self.headers

    @cached_property
    def gapless(self) -> tuple[int, int] | None:
        """Start and end of the gradients, if there are no gaps between them."""
        if not self.numels:
            return 0, 0
        ends = list(map(add, self.offsets, self.numels))
        return (self.offsets[0], ends[-1]) if list(self.offsets[1:]) == ends[:-1] else None

    @cached_property
    def is_row_major(self) -> bool:
        """Whether the payload is the concatenation of the gradients, each row-major."""
        return sum(self.numels) == self.flags_offset and all(
            torch.empty_strided(*each, device="meta").is_contiguous()
            for each in zip(self.shapes, self.strides, strict=True)
        )

    @cached_property
    def mean_numel(self) -> float:
        """Average number of elements of a gradient."""
        return sum(self.numels) / max(1, len(self.numels))

    @cached_property
    def vectors(self) -> bool:
        """Whether all gradients are one-dimensional."""
        return all(len(shape) == 1 for shape in self.shapes)


class FlatBuffer:
    """The storage of one bucket; the collective sends ``data``.

    Attributes:
        layout: see :class:`Layout`.
        dtype: dtype of the views: the dtype of ``data``, except for complex gradients.
        data: 1-D tensor of the wire dtype, ``layout.numel`` long. Gaps between gradients hold
            zeros and are never written, so that a sum over ranks keeps them zero.
        payload: view of ``data`` without the trailer.
        flags: view of the used flags, one element per gradient: 1 or 0 before the collective,
            afterwards the number of ranks that used the parameter. Any nonzero value means used:
            the sum of many ones saturates in fp16 and bf16, but never becomes zero.
        headers: view of the headers, one element each: before the collective the headers of
            this rank and zeros, afterwards the headers of all ranks. Empty in a part.
        trailer: view of the used flags and the headers; in a part, those of the whole buffer.
        encoded: the content of ``trailer`` before the collective: ``encoded_flags`` and
            ``encoded_headers``. ``None`` before :meth:`encode_trailer`.
        views: one tensor per gradient in its place, with the gradient's shape and strides.
    """

    # Defaults, also for subclasses, whose constructors differ.
    is_part = False  # made by part(): its flags are written with those of the whole buffer
    first_slot = 0  # index of a part's first slot in the whole buffer
    tables: Any = None  # tables of the kernels, created at their first launch
    encoded: Tensor | None = None
    encoded_flags: Sequence[bool] = ()
    encoded_headers: bytes = b""
    batched: Any = None  # state of the CPU's flatten, created at its first call
    # Bytes of the reduced flags in the last reduction, and the result of reduced_flags() for them.
    last_flags: tuple[bytes, Sequence[float]] = b"", ()

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, memory: Tensor | None = None
    ) -> None:
        """Allocate the buffer, or use ``memory``, uint8 zeros ``(nbytes,)``."""
        self.layout = layout
        self.dtype = dtype
        if memory is None:
            self.data = torch.empty(layout.numel, dtype=dtype, device=device)
            # Gradients need no zeros: the system allocates their pages when they are written.
            is_gapless = sum(layout.numels) == layout.flags_offset
            self.data[layout.flags_offset if is_gapless else 0 :].zero_()
        else:
            self.data = memory.view(dtype)
        self.payload = self.data[: layout.flags_offset]
        self.trailer = self.data[layout.flags_offset : layout.trailer_end]
        self.flags = self.trailer[: len(layout.numels)]
        self.headers = self.trailer[len(layout.numels) :]
        self.views: list[Tensor] = list(map(self.tensor_at, range(len(layout.numels))))
        # The last known addresses; a list would take 40 bytes for each.
        self.addresses = array("q", list(map(Tensor.data_ptr, self.views)))

    @property
    def memory(self) -> list[Tensor]:
        """All tensors that collectives and kernels use, except their tables."""
        return [self.data]

    def tensor_at(self, slot: int) -> Tensor:
        """Return a new tensor in the place of gradient ``slot``, with a separate version counter.

        Views in autograd's sense share one counter, so that a write to one would count for all of
        them.
        """
        layout, data = self.layout, self.data
        start = data.storage_offset() * data.element_size() // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=data.device).set_(
            data.untyped_storage(),
            start + layout.offsets[slot],
            layout.shapes[slot],
            layout.strides[slot],
        )

    def restore_views(self) -> None:
        """Move :attr:`views` that are elsewhere back into the buffer, with their values."""
        for slot, view in enumerate(self.views):
            offset = self.layout.offsets[slot] * self.dtype.itemsize
            is_elsewhere = view.numel() and view.data_ptr() != self.data.data_ptr() + offset
            if is_elsewhere and view.shape == self.layout.shapes[slot]:
                view.data = self.tensor_at(slot).copy_(view)
        self.addresses = array("q", list(map(Tensor.data_ptr, self.views)))

    def part(self, first: int, last: int) -> Any:
        """Return slots ``[first, last)`` as a separate flat buffer in the same storage."""
        part = copy.copy(self)
        part.cut(first, last)
        return part

    def cut(self, first: int, last: int) -> None:
        """Become the part ``[first, last)`` of the buffer of which this is a copy."""
        self.layout = self.layout.part(first, last)
        self.flags = self.flags[first:last]
        self.headers = self.headers[:0]
        self.views = self.views[first:last]
        self.addresses = self.addresses[first:last]
        self.is_part, self.first_slot = True, first
        self.tables = self.batched = None

    def write_trailer(self, used: Sequence[bool], headers: Sequence[int]) -> None:
        """Write the used flags, one per gradient, and the headers: see :meth:`encode_trailer`."""
        if (
            self.encoded is None
            or used != self.encoded_flags
            or (headers or b"") != self.encoded_headers
        ):
            self.encode_trailer(used, headers)
        self.trailer.copy_(self.encoded)  # type: ignore[arg-type]

    def own_header(self, rank: int, world_size: int) -> Tensor:
        """Return a view of this rank's header before the collective: ``(copies, header bytes)``."""
        return self.headers.view(world_size, -1)[rank : rank + 1]

    def encode_trailer(self, used: Sequence[bool], headers: Sequence[int]) -> None:
        """Update :attr:`encoded`, which does not change in most steps.

        Raises:
            ValueError: the number of flags is not the number of gradients; or see
                :meth:`Layout.encode_headers`.
        """
        own_headers = self.layout.encode_headers(headers)
        slots = len(self.layout.numels)
        if len(used) != slots:
            raise ValueError(f"the buffer has {slots} slots, but got {len(used)} flags")
        # From bytes, since torch.tensor takes 0.1 us per flag. From a bytearray, since torch warns
        # about read-only memory. torch.frombuffer rejects an empty one.
        content = bytearray(used) + own_headers
        encoded = torch.empty_like(self.trailer)
        if content:
            encoded.copy_(torch.frombuffer(content, dtype=torch.uint8))
        self.encoded = None  # invalid if an interrupt occurs before the end
        # A copy, since callers change their list in place.
        self.encoded_flags, self.encoded_headers = list(used), own_headers
        self.encoded = encoded

    @cached_property
    def flags_nbytes(self) -> int:
        """Bytes of :attr:`flags`."""
        return self.flags.numel() * self.flags.element_size()

    def reduced_flags(self) -> Sequence[float]:
        """Return :attr:`flags` on the host, which waits for a GPU; empty if all flags are set."""
        if not self.data.is_cpu:
            return self.flags.tolist()
        # In most steps they equal the flags of the previous step. The address is read each time:
        # share_memory() moves gradients that are views.
        content = string_at(self.flags.data_ptr(), self.flags_nbytes)
        if content != self.last_flags[0] or not content:
            flags = self.flags.tolist()
            self.last_flags = content, () if all(flags) else flags
        return self.last_flags[1]

    @property
    def nbytes(self) -> int:
        """Bytes that a reduction passes to collectives: payload and trailer."""
        return self.data.nbytes

    def fill_nan(self) -> None:
        """Fill all gradients with NaN."""
        self.payload.fill_(torch.nan)

    def note_not_finite(self, which: Tensor, rank: int, world_size: int) -> None:
        """Tell all ranks that these gradients, bool ``(n,)``, are not finite on this rank.

        The last ``world_size`` headers are reserved for that, one per rank.
        """
        self.flags.masked_fill_(which, torch.nan)
        self.trailer[len(self.trailer) - world_size + rank].copy_(which.any())

    def not_finite(self, world_size: int) -> tuple[Tensor, Tensor]:
        """Return which gradients are not finite, and on which ranks, after the reduction."""
        return self.flags.isnan(), self.trailer[len(self.trailer) - world_size :] != 0

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
