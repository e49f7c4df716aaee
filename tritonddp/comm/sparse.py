"""The second step of sparse gradients: all ranks gather the rows of all ranks, and sum them.

The rows are padded to the largest number on any rank and all-gathered, which every backend
supports, with the rows of many tables in one message. NCCL has no collective for sparse tensors.
gloo's sparse all-reduce also pads and gathers, but separately for each table.
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

# Alignment of the parts of a message in bytes: at least the largest element.
_ALIGNMENT = 16
# Limit in bytes of a message with rows of several tables, because each rank holds the messages of
# all ranks at the same time.
_MOST_NBYTES = 8 << 20


class _Rows:
    """The announced rows of one table."""

    def __init__(self, storage: SparseRows, announced: Sequence[Announcement]) -> None:
        self._storage = storage
        self.counts = [each.rows for each in announced]  # by rank
        # True if a rank sends no rows because its backward failed.
        self.is_broken = any(each.kind is Kind.BROKEN for each in announced)
        param = storage.param
        self.device = param.device
        self._shape = param.shape[1:]
        self._width = math.prod(self._shape) * storage.gradient_dtype.itemsize  # bytes of a row
        most = max(self.counts)
        # Size in the message of each rank.
        self.nbytes = _values_at(most) + round_up(most * self._width, _ALIGNMENT)

    def write(self, message: Tensor) -> None:
        """Write the rows of this rank into its message."""
        indices, values = self._storage.take_rows()
        _write(message, 0, indices)
        _write(message, _values_at(len(indices)), values)
        record_use(indices, values)  # made on the stream of the gradient

    def read(self, messages: Tensor) -> None:
        """Pass the rows of all ranks to the bucket, in rank order; a message row per rank."""
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
    """Sum the sparse gradients of all ranks for these buckets, whose buffers are reduced.

    One collective serves all tables that fit into a message. A table for which no rank has rows
    needs none. The host waits for the reduced buffers, which hold the row counts of all ranks.
    """
    counters = buckets[0].counters
    gathered: list[_Rows] = []
    nbytes = 0  # size of ``gathered``
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
    """Exchange the rows of these tables in one message per rank."""
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
    """Return the offset of the values after ``count`` indices."""
    return round_up(8 * count, _ALIGNMENT)
