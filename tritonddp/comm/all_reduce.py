"""Sum of a bucket over the ranks through the process group, on all ranks or on owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tritonddp.buckets.bucket import Bucket
from tritonddp.coordination import collectives
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.point_to_point import TO_OWNERS, SumOfParts, tag_of

# Limit on the bytes that one reduction sums in a single round of messages, as a multiple of the
# largest such bucket: each of these buckets takes several times its size until the reduction ends.
_FEW = 8


class Collective:
    """An exchange that uses only the process group; see :class:`BucketExchange`."""

    before_pack: Callable[[], None] | None = None
    sum_into = None

    def wait(self, bucket: Bucket, work: Work) -> None:
        work.wait()

    drain = wait


class AllReduce(Collective):
    """One SUM all-reduce of the bucket's buffer. One object serves all buckets.

    The factor ``1 / world_size`` is fused into the flatten kernel: SUM, unlike AVG, works with
    every NCCL algorithm, and a pre-scaled sum does not overflow in half precision. A weighted mean
    ``sum_r(w_r g_r) / sum_r(w_r)`` multiplies by ``w_r / world_size`` in the flatten kernel and by
    ``world_size / sum_r(w_r)`` in the unflatten kernel: the headers contain the weights of all
    ranks. For a mean over the ranks that have inputs, the headers also tell which ranks have none.

    In each reduction, the first few small buckets on the CPU are summed with one round of messages
    instead: see :func:`tritonddp.coordination.collectives.sum_directly`.
    """

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group = group.process_group
        self._size, self._most_direct = group.size, group.most_direct
        self._direct = 0  # bytes of this reduction that were sent in one round of messages
        self._counters = counters
        self._options = dist.AllreduceOptions()
        # A plain process group is called without Python code; its work objects need no wrapper.
        self._is_plain = type(self._group) is dist.ProcessGroup

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        counters, nbytes, size = self._counters, bucket.nbytes, self._size
        counters.collectives += 1
        counters.wire_bytes += nbytes
        data, group = bucket.flat.data, self._group
        if bucket.index == 0:
            self._direct = 0
        if nbytes <= self._most_direct and data.is_cpu and self._direct <= _FEW * self._most_direct:
            self._direct += nbytes
            counters.sent_bytes += (size - 1) * nbytes
            return collectives.sum_directly(data, group)
        counters.sent_bytes -= -2 * (size - 1) * nbytes // size
        if self._is_plain:
            return group.allreduce([data], self._options)
        return collectives.all_reduce(data, group)


class ReduceToOwners(Collective):
    """A reduce-scatter of the gradients, and an all-reduce of the trailer. Serves one bucket.

    A reduce-scatter sends half of the bytes of an all-reduce. The all-reduce of the trailer gives
    flags and headers to all ranks. gloo can only split buffers into equal parts. On the CPU each
    rank therefore sends each part directly to its owner, and adds the received parts of its own in
    rank order. While in flight, this takes ``world_size`` times the memory of the part that this
    rank owns.

    One reduce per owner would use only one direction of a link at a time: with two ranks over gloo
    at 1 Gbit/s it took twice the time.
    """

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group, self._counters = group, counters

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        assert bucket.owned is not None
        flat, counters, group = bucket.flat, self._counters, self._group
        trailer = flat.data[len(flat.payload) :]
        parts = [flat.data[a:b] for a, b in bucket.owned.elements(flat)]
        counters.collective(flat.payload.nbytes, group.size)
        counters.collective(trailer.nbytes, group.size, passes=2)
        first = self._reduce_scatter(parts)
        return _Both(first, group.begin_sum(trailer))

    def _reduce_scatter(self, parts: list[Tensor]) -> Work | SumOfParts:
        group, mine = self._group, parts[self._group.rank]
        if not mine.is_cpu:
            return collectives.reduce_scatter(mine, parts, group.process_group)
        tag = tag_of(group.next_exchange(), TO_OWNERS)
        rows = mine.new_empty(group.size - 1, len(mine))
        of_ranks = dict(enumerate(parts))
        return SumOfParts(group.process_group, range(group.size), of_ranks, group.rank, rows, tag)


class _Both:
    """The work of two collectives."""

    def __init__(self, first: Work | SumOfParts, last: Work) -> None:
        self._first, self._last = first, last

    def wait(self) -> None:
        """Wait for both."""
        self._first.wait()
        self._last.wait()

    def get_future(self) -> Any:
        """Return the future of the last collective."""
        return self._last.get_future()
