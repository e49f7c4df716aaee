"""The sums of a bucket's gradients, each on the rank that owns it, by the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonddp.buckets.bucket import Bucket
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
        self._group, self._counters = group.process_group, counters
        self._rank, self._size = group.rank, group.size
        self._received: Tensor | None = None  # a row from each rank, until they are added

    def launch(self, bucket: Bucket, works: list[Any], is_broken: bool = False) -> None:
        """See :meth:`BucketExchange.launch`."""
        assert bucket.owned is not None
        flat, counters, size, group = bucket.flat, self._counters, self._size, self._group
        trailer = flat.data[len(flat.payload) :]
        parts = [flat.data[a:b] for a, b in bucket.owned.elements(flat)]
        mine = parts[self._rank]
        counters.collective(flat.payload.nbytes, size)
        counters.collective(trailer.nbytes, size, passes=2)
        with Uninterrupted():
            if flat.data.is_cpu:
                self._received = mine.new_empty(size, len(mine))
                sizes = list(map(len, parts))
                first = collectives.all_to_all(self._received, flat.payload, sizes, group)
            else:
                first = collectives.reduce_scatter(mine, parts, group)
            works.append(_Both(first, collectives.all_reduce(trailer, group)))

    def wait(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`BucketExchange.wait`."""
        work.wait()
        if self._received is not None:
            assert bucket.owned is not None
            start, end = bucket.owned.elements(bucket.flat)[self._rank]
            mine, (first, *others) = bucket.flat.data[start:end], self._received.unbind()
            if others:
                torch.add(first, others.pop(0), out=mine)
            else:  # a world of one
                mine.copy_(first)
            for other in others:
                mine.add_(other)
            self._received = None

    def abort(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`BucketExchange.abort`."""
        work.wait()
        self._received = None


class _Both:
    """The work of two collectives."""

    def __init__(self, first: Work, last: Work) -> None:
        self._first, self._last = first, last

    def wait(self) -> None:
        """Wait for both."""
        self._first.wait()
        self._last.wait()

    def get_future(self) -> Any:
        """The future of the last one."""
        return self._last.get_future()
