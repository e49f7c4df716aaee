"""The sums of a bucket's gradients, each on the rank that owns it, by the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.sum_of_parts import SumOfParts
from tritonddp.coordination import collectives
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted


class ReduceToOwners:
    """A reduce-scatter of the gradients, and an all-reduce of the trailer. It serves one bucket.

    A reduce-scatter has half of the bytes of an all-reduce. That of the trailer tells all ranks
    flags, headers and marks. On the CPU, as gloo cuts buffers into equal parts only, each rank
    sends each other the part that it owns, and adds up what it gets in the order of the ranks.
    While in flight, that takes ``world_size`` times the memory of what this rank owns.

    (One reduce for each owner would use one direction of a line at a time: with two ranks over gloo
    at 1 Gbit/s they took twice the time.)
    """

    before_pack: Callable[[], None] | None = None
    after_unpack: Callable[[], None] | None = None

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group, self._counters = group, counters

    def launch(self, bucket: Bucket, works: list[Any], is_broken: bool = False) -> None:
        """See :meth:`BucketExchange.launch`."""
        assert bucket.owned is not None
        flat, counters, group = bucket.flat, self._counters, self._group
        trailer = flat.data[len(flat.payload) :]
        parts = [flat.data[a:b] for a, b in bucket.owned.elements(flat)]
        counters.collective(flat.payload.nbytes, group.size)
        counters.collective(trailer.nbytes, group.size, passes=2)
        with Uninterrupted():
            first = self._reduce_scatter(parts)
            works.append(_Both(first, collectives.all_reduce(trailer, group.process_group)))

    def _reduce_scatter(self, parts: list[Tensor]) -> Work | SumOfParts:
        group, mine = self._group, parts[self._group.rank]
        if not mine.is_cpu:
            return collectives.reduce_scatter(mine, parts, group.process_group)
        rows = mine.new_empty(group.size - 1, len(mine))
        of_ranks = dict(enumerate(parts))
        return SumOfParts(
            group.process_group, range(group.size), of_ranks, group.rank, rows, group.next_tag()
        )

    def wait(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`BucketExchange.wait`."""
        work.wait()

    def abort(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`BucketExchange.abort`."""
        work.wait()


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
