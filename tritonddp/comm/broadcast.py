"""Broadcast of the initial state and of module buffers from one rank, the *source*.

Tensors are sent together through the process group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._modes import outside_modes
from tritonddp._torch import foreach_copy_
from tritonddp.coordination.collectives import broadcast
from tritonddp.coordination.group import Group

# From this number of bytes on, a separate message costs less than two copies.
_LARGE = 2**18


class StateBroadcast:
    """Overwrites parameters and buffers with the values of rank ``source.source_rank``."""

    def __init__(self, group: Group, source: Any) -> None:
        self._group = group
        self._source = source
        self.max_bytes = 250 * 1024 * 1024  # per message

    def send(self, tensors: Sequence[Tensor], where: str, what: str) -> None:
        """Overwrite ``tensors``; see :func:`broadcast_coalesced`.

        For error messages, ``where`` is the step of this rank, and ``what`` describes the tensors.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        group, nbytes = self._group, sum(tensor.nbytes for tensor in tensors)
        what = f"broadcast of {len(tensors)} {what}, {nbytes} bytes"
        with group.guard(f"rank {group.rank}, {where}", what):
            broadcast_coalesced(
                tensors, group.process_group, self._source.source_rank, self.max_bytes
            )


class Message:
    """Tensors of one device that are sent together.

    Attributes:
        pieces: for each tensor its bytes, or the bytes of its copy.
        copies: pairs of a tensor and the copy that is sent, for tensors that are not row-major,
            or have the conjugate or negative bit.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        rows = [_row_of(tensor) for tensor in tensors]
        self.pieces = list(map(_bytes_of_row, rows))
        self.sizes = [piece.numel() for piece in self.pieces]
        self._flat: Tensor | None = None
        self.copies = [
            (tensor, row)
            for tensor, row in zip(tensors, rows, strict=True)
            if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous()
        ]

    @property
    def flat(self) -> Tensor:
        """The bytes to send: the only piece itself, or separate memory for several pieces.

        The memory is kept with the message: new pages would cost as much as the copy into them.
        """
        if self._flat is None:
            self._flat = self.pieces[0]
            if len(self.pieces) > 1:
                with outside_modes(self.tensors):
                    self._flat = self.pieces[0].new_empty(sum(self.sizes))
        return self._flat

    def fill(self) -> None:
        """Write the bytes of the tensors into :attr:`flat`."""
        if len(self.pieces) > 1:
            torch.cat(self.pieces, out=self.flat)

    def unpack(self) -> None:
        """Write :attr:`flat`, which was received, to the tensors."""
        if len(self.pieces) > 1:
            foreach_copy_(self.pieces, self.flat.split(self.sizes))
        self.copy_back()

    def copy_back(self) -> None:
        """Write the copies, which were overwritten, back to their tensors."""
        for tensor, row in self.copies:
            tensor.copy_(row)


def _row_of(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is not row-major or has a conjugate or negative bit."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bytes_of_row(row: Tensor) -> Tensor:
    # A single element may have any stride.
    return row.as_strided((row.numel(),), (1,)).view(torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order: a view if it is row-major, else a copy."""
    return _bytes_of_row(_row_of(tensor))


@cache
def memcmp() -> Callable[[int, int, int], int]:
    """Return C's ``memcmp``: takes two addresses and a number of bytes; returns 0 if equal."""
    function = ctypes.CDLL(None).memcmp
    function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    return function


def broadcast_coalesced(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, group_src: int, max_bytes: int
) -> None:
    """Overwrite ``tensors`` with the values of rank ``group_src`` of ``group``.

    Tensors of all dtypes are sent together as bytes, so that a model with float and integer buffers
    needs one broadcast, not one per dtype. The tensors must be dense, with the same shapes and
    dtypes in the same order on every rank. A message holds at most ``max_bytes``, or a single
    larger tensor. Large tensors are sent in separate messages, without a copy.
    """
    with torch.no_grad():
        large = [each for each in tensors if each.nbytes >= _LARGE]
        small = [each for each in tensors if each.nbytes < _LARGE]
        messages = [*messages_of(large, 0), *messages_of(small, max_bytes)]
        broadcast_messages(messages, group, group_src)


def broadcast_messages(messages: Iterable[Message], group: dist.ProcessGroup, source: int) -> None:
    """Send these messages from rank ``source`` to all ranks, one after the other."""
    is_source = group.rank() == source
    for each in messages:
        if is_source:
            each.fill()
        broadcast(each.flat, group, source).wait()
        if not is_source:
            each.unpack()


def messages_of(tensors: Sequence[Tensor], max_bytes: int) -> list[Message]:
    """Return messages of at most ``max_bytes`` or one tensor; they view the tensors' bytes."""
    with outside_modes(tensors):
        return [Message(batch) for batch in _batches(tensors, max_bytes)]


def _batches(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Split ``tensors`` into lists of one device and at most ``max_bytes``, in a fixed order."""
    for group in _by_device(tensor for tensor in tensors if tensor.numel()):
        batch: list[Tensor] = []
        size = 0
        for tensor in group:
            if batch and size + tensor.nbytes > max_bytes:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.nbytes
        yield batch


def _by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())
