"""Initial state and module buffers: every rank gets those of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import foreach_copy_
from tritonddp.coordination.collectives import broadcast
from tritonddp.coordination.group import Group

# Where the bytes of a dense tensor are, and whether they are all and in order. Views that are held
# keep any other tensor from getting the same address.
_STATE = (
    Tensor.data_ptr,
    attrgetter("nbytes"),
    Tensor.is_contiguous,
    Tensor.is_conj,
    Tensor.is_neg,
)


class StateBroadcast:
    """Overwrites parameters and buffers with those of one rank: of ``source.source_rank``."""

    def __init__(self, group: Group, source: Any) -> None:
        self._group = group
        self._source = source
        self.max_bytes = 250 * 1024 * 1024  # of one message
        self._messages = Messages()

    def send(self, tensors: Sequence[Tensor], place: str, what: str, again: bool = False) -> None:
        """Overwrite ``tensors``; see :func:`broadcast_coalesced`.

        For errors, ``place`` says where in its program this rank is, and ``what`` what they are.
        With ``again`` they are likely to be sent again, as they are.

        Raises:
            RuntimeError: a rank is missing, which is named.
        """
        group = self._group
        try:
            broadcast_coalesced(
                *(tensors, group.process_group, self._source.source_rank, self.max_bytes),
                self._messages if again else None,
            )
        except RuntimeError as error:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            raise group.explain(
                f"rank {group.rank}, {place}",
                f"broadcast of {len(tensors)} {what}, {nbytes} bytes",
                error,
            ) from error


class Messages:
    """What is sent of some tensors: views of their bytes, in messages.

    Most of a broadcast's time would go into them. They are made anew where a tensor has other
    memory than the last time, or more or less of it. Until then they hold it.
    """

    def __init__(self) -> None:
        self._state: list[Any] = []
        self._messages: list[_Message] = []

    def of(self, tensors: Sequence[Tensor], max_bytes: int) -> list[_Message]:
        """As :func:`broadcast_coalesced` sends them."""
        state = [max_bytes, *(list(map(each, tensors)) for each in _STATE)]
        if state == self._state:
            return self._messages
        messages = [_Message(batch) for batch in _batches(tensors, max_bytes)]
        if {*map(type, tensors)} == {Tensor} and not any(message.copies for message in messages):
            self._state, self._messages = state, messages
        else:
            self._state, self._messages = [], []
        return messages


class _Message:
    """Some tensors of one device.

    Attributes:
        pieces: the bytes of each.
        sizes: of the pieces.
        copies: tensors that are not row-major, or are flagged as conjugate or as negative, and the
            copies of them that are sent.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        rows = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        # (A single element may have any stride.)
        lines = [row.as_strided((row.numel(),), (1,)) for row in rows]
        self.pieces = [line.view(torch.uint8) for line in lines]
        self.sizes = [piece.numel() for piece in self.pieces]
        self.copies = [
            (tensor, row)
            for tensor, row in zip(tensors, rows, strict=True)
            if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous()
        ]


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    group_src: int,
    max_bytes: int,
    messages: Messages | None = None,
) -> None:
    """Overwrite ``tensors`` with those of rank ``group_src`` of ``group``.

    Tensors of all dtypes travel together as bytes, so that a model with float and integer buffers
    needs one broadcast, not one per dtype. They are dense, of the same shapes and dtypes in the
    same order on every rank. Messages hold at most ``max_bytes``, or one tensor. With ``messages``
    the same tensors take less time the next time.
    """
    is_source = group.rank() == group_src
    with torch.no_grad():
        for each in (messages or Messages()).of(tensors, max_bytes):
            message = each.pieces[0] if len(each.pieces) == 1 else torch.cat(each.pieces)
            broadcast(message, group, group_src).wait()
            if is_source:
                continue
            if len(each.pieces) > 1:
                foreach_copy_(each.pieces, message.split(each.sizes))
            for tensor, row in each.copies:
                tensor.copy_(row)


def _batches(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Cut ``tensors`` into lists of one device and at most ``max_bytes`` each, in a fixed order."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for group in by_device.values():
        batch: list[Tensor] = []
        size = 0
        for tensor in group:
            if batch and size + tensor.nbytes > max_bytes:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.nbytes
        yield batch
