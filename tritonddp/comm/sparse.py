"""The second step of a sparse gradient: all ranks gather the rows of all, and sum them.

The rows are padded to the largest number on any rank, and all-gathered, which every backend
offers. NCCL has no collective for sparse tensors, and gloo's pads and gathers in the same way.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._device import let_go
from tritonddp.buckets.sparse_bucket import Kind, SparseBucket
from tritonddp.coordination.collectives import all_gather_into, all_reduce
from tritonddp.coordination.counters import Counters
from tritonddp.kernels.flat_buffer import round_up

# Bytes to which the parts of a message are aligned: at least the largest element.
_ALIGNMENT = 16


@torch.no_grad()
def exchange_rows(bucket: SparseBucket, group: dist.ProcessGroup, counters: Counters) -> None:
    """Give ``bucket``, whose buffer is reduced, the sum of the sparse gradients of all ranks.

    One collective, or none if no rank has rows. The host waits for the reduced buffer, which holds
    the row counts of all ranks.
    """
    if not bucket.flat.flags.item():  # no rank has used the parameter
        return
    announced = bucket.announced()
    kinds = {each.kind for each in announced}
    if Kind.DENSE in kinds:
        total = bucket.take_dense()
        counters.collective(total.nbytes, group.size(), passes=2)
        all_reduce(torch.view_as_real(total) if total.is_complex() else total, group).wait()
        receive = partial(bucket.receive_dense, total)
        numbers = total
    else:
        indices, numbers = _gather(bucket, [each.rows for each in announced], group, counters)
        receive = partial(bucket.receive_rows, indices, numbers)
    if Kind.BROKEN in kinds:  # a sum without one of the ranks must not look like a mean
        numbers.fill_(torch.nan)
    receive()


def _gather(
    bucket: SparseBucket, counts: list[int], group: dist.ProcessGroup, counters: Counters
) -> tuple[Tensor, Tensor]:
    """Indices and values of all ranks, in rank order."""
    indices, values = bucket.take_rows()
    if not any(counts):
        return indices, values
    width = values[0:0].new_empty((1, *values.shape[1:])).nbytes  # bytes of a row
    size = _values_at(max(counts)) + round_up(max(counts) * width, _ALIGNMENT)
    message = indices.new_zeros(size, dtype=torch.uint8)
    _write(message, 0, indices)
    _write(message, _values_at(len(indices)), values)
    let_go(indices, values)  # made on the stream of the gradient
    gathered = message.new_empty(size * len(counts))
    counters.collective(gathered.nbytes, group.size())
    all_gather_into(gathered, message, group).wait()
    all_indices, all_values = [], []
    for theirs, count in zip(gathered.split(size), counts, strict=True):
        all_indices.append(theirs[: 8 * count].view(torch.int64))
        rows = theirs[_values_at(count) :][: count * width].view(values.dtype)
        all_values.append(rows.view(count, *values.shape[1:]))
    return torch.cat(all_indices), torch.cat(all_values)


def _write(message: Tensor, place: int, content: Tensor) -> None:
    content = content.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    message[place:][: content.numel()].copy_(content)


def _values_at(count: int) -> int:
    """Where the values begin behind ``count`` indices."""
    return round_up(8 * count, _ALIGNMENT)
