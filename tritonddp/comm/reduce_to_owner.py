"""The sum over ranks of a bucket whose gradients one rank owns, by the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tritonddp.buckets.bucket import Bucket
from tritonddp.coordination import collectives
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted


class ReduceToOwner:
    """A SUM reduce of the gradients to the owner, and an all-reduce of the trailer.

    So all ranks know flags, headers and marks, as with :class:`AllReduce`, which has twice the
    bytes of a reduce. One object serves one bucket.
    """

    before_pack: Callable[[], None] | None = None
    after_unpack: Callable[[], None] | None = None

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group, self._counters = group.process_group, counters
        self._size = group.size

    def launch(self, bucket: Bucket, works: list[Any], is_broken: bool = False) -> None:
        """See :meth:`BucketExchange.launch`."""
        assert bucket.owner is not None
        flat, counters, size = bucket.flat, self._counters, self._size
        first = flat.layout.flags_offset
        payload, trailer = flat.data[:first], flat.data[first:]
        counters.collective(payload.nbytes, size)
        counters.collective(trailer.nbytes, size, passes=2)
        with Uninterrupted():
            to_owner = collectives.reduce(payload, self._group, bucket.owner.rank)
            works.append(_Both(to_owner, collectives.all_reduce(trailer, self._group)))

    def wait(self, bucket: Bucket, work: Work) -> Tensor | None:
        """See :meth:`BucketExchange.wait`."""
        work.wait()
        return None

    def abort(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`BucketExchange.abort`."""
        work.wait()


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
