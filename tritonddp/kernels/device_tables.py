"""Device tables: tables of addresses, by which one launch reaches any number of gradients.

A *chunk* is the work of one program: at most ``block`` consecutive elements of one gradient. The
chunks of a buffer never change. The addresses of the gradients may change every step. Together with
the used flags, the headers and the scale they are one small table, which is uploaded when it
changed. The last few tables stay on the device: allocators often return the same addresses in turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import reduce
from operator import or_
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from tritonddp._device import is_capturing, upload, uploaded
from tritonddp.kernels.flat_buffer import FlatBuffer

# In elements of the wire dtype: so every 16-byte access to the buffer is aligned for any wire
# dtype, which the compiler can rely on without a check per launch.
ALIGNMENT = 16

# Elements of a chunk, and warps of a program: 4 accesses of 16 bytes in flight per thread at about
# 30 registers. The same for all buffers, since no other choice was better: on an H100 buffers of
# 0.3 to 205 MB reached 97 to 100 % of the bandwidth of the best of 1024 to 8192 elements with 4 or
# 8 warps (benchmarks/results/gpu-h100/host.txt).
BLOCK, WARPS = 2048, 4

_ADDRESS_OF = Tensor.data_ptr

# If the loop still holds the gradient of the last step, two addresses alternate. Gradients that are
# flattened from one place, and unflattened to another, need two tables per step.
_KEPT = 4


class _Table:
    """One version of :attr:`DeviceTables.dynamic`: its words, and the launches that read it."""

    __slots__ = ("dynamic", "launches", "words")

    def __init__(self, dynamic: Tensor, words: list[int]) -> None:
        self.dynamic = dynamic
        self.words = words
        self.launches: dict[tuple[Any, ...], Any] = {}


class DeviceTables:
    """The tables of one flat buffer, on its device; shared by flatten and unflatten.

    Attributes:
        chunks: int64 ``(num_chunks, 4)``, one row per program: slot, first element within the
            gradient, first element within the buffer, number of elements (1 to ``block``).
            Gradients without elements have no rows.
        dynamic: int64 ``(2 n + m + 1,)``: n addresses (0 where there is no gradient), n used flags
            (0 or 1), m headers, the bits of the scale as fp64. One copy uploads everything, and no
            launch depends on the scale's value. It is one of several tensors, each of which has
            its own launches.
        one: fp64 ``(1,)``, 1.0: the factor of an unflatten without a factor.
        num_chunks: number of rows of ``chunks``.
        block: largest number of elements of a chunk, a power of two and a multiple of 16.
        num_warps: number of warps of a program.
        aligned: every address is a multiple of 16 bytes.
        uploads: number of copies of ``dynamic`` to the device so far.
        device_index: index of the GPU; ``None`` for tensors on the CPU.
        launches: prepared launches for this buffer. The key is the kernel's launcher, and all that
            is compiled in and may change between steps.
    """

    def __init__(
        self, flat: FlatBuffer, block: int | None = None, num_warps: int | None = None
    ) -> None:
        """Build the chunk rows of ``flat``.

        Raises:
            ValueError: ``block`` is not a power of two of at least 16, or the layout of the buffer
                is not aligned for 16-byte accesses.
        """
        block = BLOCK if block is None else block
        self.num_warps = WARPS if num_warps is None else num_warps
        if block < 16 or block & (block - 1):
            raise ValueError(f"block should be a power of two of at least 16, but is {block}")
        layout, device = flat.layout, flat.data.device
        for slot, offset in enumerate(layout.offsets):
            if offset % ALIGNMENT:
                raise ValueError(
                    f"slot {slot} begins at element {offset} of the buffer, which is no multiple "
                    f"of {ALIGNMENT}: make the layout with alignment={ALIGNMENT}"
                )
        self.block = block
        self.chunks = uploaded(self._rows(flat, block), device)
        self.num_chunks = self.chunks.shape[0]
        words = [0] * (2 * len(layout.numels) + layout.headers + 1)
        self._table = _Table(torch.zeros(len(words), dtype=torch.int64, device=device), words)
        self._tables = [self._table]  # the least recently used one is first
        self.dynamic, self.launches = self._table.dynamic, self._table.launches
        self.one = torch.ones(1, dtype=torch.float64, device=device)
        self.aligned = True
        self.uploads = 0
        self.device_index = device.index if device.type == "cuda" else None
        self._layout = layout
        self._device = device
        self._dtype: torch.dtype | None = None
        self._addresses: list[int] = [0] * len(layout.numels)
        self._used: list[bool] = [False] * len(layout.numels)
        self._headers: Sequence[int] = bytes(layout.headers)
        self._scale = 0.0
        self._is_captured = False
        self._captured: list[Tensor] = []  # sources of the copies in CUDA graphs

    def _rows(self, flat: FlatBuffer, block: int) -> Tensor:
        """The rows of :attr:`chunks`, on the CPU."""
        numels = torch.tensor(flat.layout.numels, dtype=torch.int64)
        offsets = torch.tensor(flat.layout.offsets, dtype=torch.int64)
        per_slot = (numels + block - 1) // block
        slot = torch.repeat_interleave(torch.arange(len(numels)), per_slot)
        first_row = torch.cumsum(per_slot, 0) - per_slot
        start = (torch.arange(len(slot)) - first_row[slot]) * block
        count = torch.clamp(numels[slot] - start, max=block)
        return torch.stack([slot, start, offsets[slot] + start, count], dim=1)

    @classmethod
    def of(cls, flat: FlatBuffer) -> Any:
        """The tables of ``flat``, built when they are first asked for."""
        if flat.tables is None:
            flat.tables = cls(flat)
        return flat.tables

    def update(
        self,
        grads: Sequence[Tensor | None],
        used: Sequence[bool] | None = None,
        scale: float | None = None,
        headers: Sequence[int] | None = None,
    ) -> torch.dtype | None:
        """Bring ``dynamic`` up to date on the current stream, uploading it only if it changed.

        Args:
            grads: one per slot, each with its slot's shape and strides.
            used: one flag per slot. ``None``, here and below, keeps the last value.
            scale: the factor.
            headers: as many as the layout has; fastest if they are the same ``bytes`` each time.

        Returns:
            The dtype of the gradients, ``None`` if there are none.

        Raises:
            ValueError: the number of gradients or flags is not that of the slots; or the headers
                are not as many as the layout's, or not in 0..255.
            TypeError: a gradient has another dtype or device than expected. Checked when an
                address or the first dtype changed, not at every launch.
        """
        # The fast path, if nothing has changed: in C, without a call of another function.
        try:
            addresses = list(map(_ADDRESS_OF, grads))  # type: ignore[arg-type]
            dtype = grads[0].dtype if grads else None  # type: ignore[union-attr]
        except TypeError:  # one is missing
            addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
            dtype = next((grad.dtype for grad in grads if grad is not None), None)
        if (
            addresses != self._addresses
            or dtype is not self._dtype
            or (used is not None and used != self._used)
            or (headers is not None and (headers or b"") != self._headers)
            # 0.0 equals -0.0.
            or (scale is not None and (scale != self._scale or not scale or self._is_captured))
        ):
            self._change(grads, addresses, dtype, used, scale, headers)
        return dtype

    def _change(
        self,
        grads: Sequence[Tensor | None],
        addresses: list[int],
        dtype: torch.dtype | None,
        used: Sequence[bool] | None,
        scale: float | None,
        headers: Sequence[int] | None,
    ) -> None:
        """See :meth:`update`: check everything, and upload the table if it has changed."""
        if len(addresses) != len(self._addresses):
            raise ValueError(
                f"the buffer has {len(self._addresses)} slots, but {len(addresses)} gradients came"
            )
        used = self._used if used is None else list(used)
        if len(used) != len(addresses):
            raise ValueError(f"the buffer has {len(addresses)} slots, but {len(used)} flags came")
        headers = self._headers if headers is None else self._layout.encode_headers(headers)
        if addresses != self._addresses or dtype is not self._dtype:
            self._check(grads, dtype)
            self.aligned = not reduce(or_, addresses, 0) & 15
        self._addresses, self._dtype, self._used, self._headers = addresses, dtype, used, headers
        self._scale = self._scale if scale is None else scale
        # The scale by its bits: -0.0 equals 0.0 and NaN does not equal itself.
        (bits,) = unpack("<q", pack("<d", self._scale))
        words = [*addresses, *map(int, map(bool, used)), *headers, bits]
        if words != self._table.words and not self._is_captured:
            self._choose(words)
        table = self._table
        if words != table.words or (self._is_captured and scale is not None):
            table.words = []  # not valid until the upload has succeeded
            pinned = upload(table.dynamic, torch.frombuffer(array("q", words), dtype=torch.int64))
            table.words = words
            self.uploads += 1
            if self._is_captured and is_capturing():
                self._captured.append(pinned)

    def _choose(self, words: list[int]) -> None:
        """Use the table that holds ``words``; else a new one, or the least recently used one."""
        tables = self._tables
        found = next((each for each in tables if each.words == words), None)
        if found is None and len(tables) < _KEPT:
            found = _Table(torch.empty_like(self.dynamic), [])
        elif found is None:
            found = tables.pop(0)
        else:
            tables.remove(found)
        tables.append(found)
        self._table, self.dynamic, self.launches = found, found.dynamic, found.launches

    def forget_launches(self) -> None:
        """Drop all prepared launches, since they are bound to tensors that will be replaced."""
        for each in self._tables:
            each.launches.clear()

    @property
    def memory(self) -> list[Tensor]:
        """All tensors of these tables that kernels read."""
        return [self.chunks, self.one, *(each.dynamic for each in self._tables)]

    def capture(self) -> None:
        """The capture of a CUDA graph begins, whose launches read :attr:`dynamic`.

        From now on each ``flatten`` uploads its table again, into the same memory: a replay may
        have overwritten it.
        """
        self._is_captured = True

    def _check(self, grads: Sequence[Tensor | None], dtype: torch.dtype | None) -> None:
        # A kernel cannot check an address: with a wrong dtype it would read garbage, and a host
        # address faults on the device.
        for slot, grad in enumerate(grads):
            if grad is None:
                continue
            if grad.dtype is not dtype:
                raise TypeError(
                    f"the gradient in slot {slot} is {grad.dtype}, but those before it are "
                    f"{dtype}: give gradients of different dtypes buffers of their own"
                )
            if grad.device != self._device:
                raise TypeError(
                    f"the gradient in slot {slot} is on {grad.device}, but its buffer is on "
                    f"{self._device}: move the parameter or the buffer"
                )
