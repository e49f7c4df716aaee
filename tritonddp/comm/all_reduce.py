"""The sum of a bucket over ranks, on all of them or on owners, by the process group."""

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

# All buckets of a reduction that go in one round of messages have at most about so many times the
# bytes of the largest such bucket: until their end they take several times their memory.
_FEW = 8


class Collective:
    """An exchange by the process group alone; see :class:`BucketExchange`."""

    before_pack: Callable[[], None] | None = None
    sum_into = None

    def wait(self, bucket: Bucket, work: Work) -> None:
        work.wait()

    drain = wait


class AllReduce(Collective):
    """One SUM all-reduce of the bucket's buffer. One object serves all buckets.

    The factor ``1 / world_size`` is fused into the flatten kernel: SUM, unlike AVG, stays open to
    every NCCL algorithm, and a pre-scaled sum does not overflow in half precision. A weighted mean
    ``sum_r(w_r g_r) / sum_r(w_r)`` takes ``w_r / world_size`` there and ``world_size / sum_r(w_r)``
    in the unflatten kernel: the weights are in the headers of the ranks. For a mean over the ranks
    that have inputs, the headers hold the number of those ranks too.

    Small buckets on the CPU are summed by one round of messages instead, the first few of each
    reduction: see :func:`tritonddp.coordination.collectives.sum_directly`.
    """

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group = group.process_group
        self._size, self._most_direct = group.size, group.most_direct
        self._direct = 0  # bytes of this reduction that have gone in one round of messages
        self._counters = counters
        self._options = dist.AllreduceOptions()
        # A plain process group is called without Python code, and its work objects need no wrapper.
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
    """A reduce-scatter of the gradients, and an all-reduce of the trailer. It serves one bucket.

    A reduce-scatter has half of the bytes of an all-reduce. That of the trailer tells all ranks
    flags and headers. On the CPU, as gloo cuts buffers into equal parts only, each rank
    sends each other the part that it owns, and adds up what it gets in the order of the ranks.
    While in flight, that takes ``world_size`` times the memory of what this rank owns.

    (One reduce for each owner would use one direction of a line at a time: with two ranks over gloo
    at 1 Gbit/s they took twice the time.)
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
        """The future of the last one."""
        return self._last.get_future()
