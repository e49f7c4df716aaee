"""The protocol of a reduction, and the plain all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from tritonddp.bucket import Bucket, Segment
from tritonddp.counters import Counters


class Work(Protocol):
    """What a reduction under way can be asked: ``torch.distributed.Work`` is one."""

    def wait(self) -> object:
        """Block the current stream (CUDA) or the host (CPU) until the result is there."""

    def get_future(self) -> torch.futures.Future:
        """Complete when the result is there; asked by traces only."""


class Reduction(Protocol):
    """One way to turn the local gradients of a bucket into their mean over all ranks.

    It owns the pipeline of a bucket (flatten, collective, unflatten) and knows nothing of hooks,
    graphs or other buckets. The reducer starts buckets in bucket order on every rank and finishes
    them in the same order, so the collectives of a reduction match without further agreement.
    """

    def fill(self, bucket: Bucket, segment: Segment, used: Sequence[bool]) -> None:
        """Flatten a segment of ``bucket``, whose gradients are ready, on the current stream.

        ``used`` says for each of its parameters whether this rank's backward reached it.
        """

    def start(self, bucket: Bucket) -> Work:
        """All segments are filled: issue the collective asynchronously."""

    def start_poisoned(self, bucket: Bucket) -> Work:
        """Take part in the collective of ``bucket`` with NaN instead of gradients.

        For a rank whose backward broke: the collectives of the ranks stay in step, and its peers
        see NaN where they would otherwise get a mean that lacks this rank.
        """

    def finish(self, bucket: Bucket, work: Work) -> None:
        """Wait for the collective and bring the result into ``.grad``."""


class AllReduce:
    """Mean over ranks by one SUM all-reduce a bucket.

    The factor ``1 / world_size`` is fused into the flatten kernel: SUM, unlike AVG, stays open to
    every NCCL algorithm, and a pre-scaled sum does not overflow in half precision.
    """

    def __init__(self, process_group: dist.ProcessGroup, counters: Counters) -> None:
        self._group = process_group
        self._scale = 1.0 / process_group.size()
        self._counters = counters

    def fill(self, bucket: Bucket, segment: Segment, used: Sequence[bool]) -> None:
        """See :meth:`Reduction.fill`."""
        bucket.flatten(segment, used, self._scale)

    def start(self, bucket: Bucket) -> Work:
        """See :meth:`Reduction.start`."""
        bucket.seal()
        return self._issue(bucket)

    def _issue(self, bucket: Bucket) -> Work:
        self._counters.collectives += 1
        self._counters.wire_bytes += bucket.nbytes
        work = dist.all_reduce(bucket.flat.data, group=self._group, async_op=True)
        assert work is not None  # None is for ranks outside the group only
        return work

    def start_poisoned(self, bucket: Bucket) -> Work:
        """See :meth:`Reduction.start_poisoned`."""
        bucket.flat.payload.fill_(torch.nan)
        bucket.flat.flags.zero_()
        return self._issue(bucket)

    def finish(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`Reduction.finish`."""
        work.wait()
        bucket.unflatten()
