"""The second step of sparse gradients: all ranks gather the rows of all, and sum them.

The rows are padded to the largest number on any rank, and all-gathered, which every backend
offers: those of many tables in one message. NCCL has no collective for sparse tensors, and gloo's
pads and gathers in the same way, each table by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonddp._device import record_use
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.grad_storage.sparse_rows import Announcement, Kind, SparseRows
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.kernels.flat_buffer import round_up

# Bytes to which the parts of a message are aligned: at least the largest element.
_ALIGNMENT = 16
# A message with further rows takes no more bytes: a rank holds those of all ranks at a time.
_MOST_NBYTES = 8 << 20


class _Rows:
    """Rows of one table that the ranks have announced."""

    def __init__(self, storage: SparseRows, announced: Sequence[Announcement]) -> None:
        self._storage = storage
        self.counts = [each.rows for each in announced]  # of each rank
        # A rank sends none, since its backward failed.
        self.is_broken = any(each.kind is Kind.BROKEN for each in announced)
        param = storage.param
        self.device = param.device
        self._shape = param.shape[1:]
        self._width = math.prod(self._shape) * storage.gradient_dtype.itemsize  # bytes of a row
        most = max(self.counts)
        # In the message of a rank.
        self.nbytes = _values_at(most) + round_up(most * self._width, _ALIGNMENT)

    def write(self, message: Tensor) -> None:
        """Write those of this rank into their part of its message."""
        indices, values = self._storage.take_rows()
        _write(message, 0, indices)
        _write(message, _values_at(len(indices)), values)
        record_use(indices, values)  # made on the stream of the gradient

    def read(self, messages: Tensor) -> None:
        """Give the bucket those of all ranks, in rank order, from their parts: a row a rank."""
        dtype = self._storage.gradient_dtype
        width = self._width // dtype.itemsize
        all_indices, all_values = [], []
        integers, numbers = messages.view(torch.int64).unbind(), messages.view(dtype).unbind()
        for their_integers, theirs, count in zip(integers, numbers, self.counts, strict=True):
            first = _values_at(count) // dtype.itemsize
            all_indices.append(their_integers[:count])
            all_values.append(theirs[first : first + count * width])
        values = torch.cat(all_values).view(sum(self.counts), *self._shape)
        if self.is_broken:  # a sum without one of the ranks must not look like a mean
            values.fill_(torch.nan)
        self._storage.receive_rows(torch.cat(all_indices), values)


def exchange_rows(buckets: Sequence[Bucket], group: Group) -> None:
    """Give these buckets, whose buffers are reduced, the sums of the sparse gradients of all ranks.

    A collective for as many as fit into a message, none for those of which no rank has rows. The
    host waits for the reduced buffers, which hold the row counts of all ranks.
    """
    counters = buckets[0].counters
    gathered: list[_Rows] = []
    nbytes = 0  # of these
    for bucket in buckets:
        if not bucket.flat.flags.item():  # no rank has used the parameter
            continue
        storage = bucket.storage
        assert isinstance(storage, SparseRows)
        announced = storage.announced(bucket)
        rows = _Rows(storage, announced)
        if any(each.kind is Kind.DENSE for each in announced):
            total = storage.take_dense()
            counters.collective(total.nbytes, group.size, passes=2)
            group.begin_sum(torch.view_as_real(total) if total.is_complex() else total).wait()
            if rows.is_broken:
                total.fill_(torch.nan)
            storage.receive_dense(total)
            continue
        if not rows.nbytes:
            storage.receive_rows(*storage.take_rows())
            continue
        nbytes += rows.nbytes
        if gathered and (nbytes > _MOST_NBYTES or gathered[0].device != rows.device):
            _gather(gathered, group, counters)
            gathered, nbytes = [], rows.nbytes
        gathered.append(rows)
    if gathered:
        _gather(gathered, group, counters)


def _gather(tables: Sequence[_Rows], group: Group, counters: Counters) -> None:
    """Exchange the rows of these tables in one message of each rank."""
    sizes = [each.nbytes for each in tables]
    size = sum(sizes)
    message = torch.zeros(size, dtype=torch.uint8, device=tables[0].device)
    for table, part in zip(tables, message.split_with_sizes(sizes), strict=True):
        table.write(part)
    gathered = message.new_empty(group.size, size)
    counters.collective(gathered.nbytes, group.size)
    group.begin_gather(gathered, message).wait()
    parts = gathered.split_with_sizes(sizes, dim=1)
    for table, theirs in zip(tables, parts, strict=True):
        table.read(theirs)


def _write(message: Tensor, place: int, content: Tensor) -> None:
    content = content.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    message[place : place + content.numel()].copy_(content)


def _values_at(count: int) -> int:
    """Where the values begin behind ``count`` indices."""
    return round_up(8 * count, _ALIGNMENT)
