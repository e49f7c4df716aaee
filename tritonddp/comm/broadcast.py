"""Initial state and module buffers: every rank gets those of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import foreach_copy_
from tritonddp.coordination.collectives import broadcast
from tritonddp.coordination.group import Group


class StateBroadcast:
    """Overwrites parameters and buffers with those of one rank: of ``source.source_rank``."""

    def __init__(self, group: Group, source: Any) -> None:
        self._group = group
        self._source = source
        self.max_bytes = 250 * 1024 * 1024  # of one message

    def send(self, tensors: Sequence[Tensor], place: str, what: str) -> None:
        """Overwrite ``tensors``; see :func:`broadcast_coalesced`.

        For errors, ``place`` says where in its program this rank is, and ``what`` what they are.

        Raises:
            RuntimeError: a rank is missing, which is named.
        """
        group = self._group
        try:
            broadcast_coalesced(
                tensors, group.process_group, self._source.source_rank, self.max_bytes
            )
        except RuntimeError as error:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            raise group.explain(
                f"rank {group.rank}, {place}",
                f"broadcast of {len(tensors)} {what}, {nbytes} bytes",
                error,
            ) from error


def broadcast_coalesced(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, group_src: int, max_bytes: int
) -> None:
    """Overwrite ``tensors`` with those of rank ``group_src`` of ``group``.

    Tensors of all dtypes travel together as bytes, so that a model with float and integer buffers
    needs one broadcast, not one per dtype. They are dense, of the same shapes and dtypes in the
    same order on every rank. Messages hold at most ``max_bytes``, or one tensor.
    """
    is_source = group.rank() == group_src
    with torch.no_grad():
        for batch in _batches(tensors, max_bytes):
            # A tensor that is not row-major, or is flagged as conjugate or as negative, is sent
            # through a copy.
            rows = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in batch]
            pieces = [row.detach().view(-1).view(torch.uint8) for row in rows]
            message = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            broadcast(message, group, group_src).wait()
            if is_source:
                continue
            if len(pieces) > 1:
                foreach_copy_(pieces, message.split([piece.numel() for piece in pieces]))
            for tensor, row in zip(batch, rows, strict=True):
                if row is not tensor:
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
