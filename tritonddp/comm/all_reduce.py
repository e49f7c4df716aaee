"""The sum over ranks by one all-reduce per bucket."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import string_at

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import ALL_TO_ALL_SINGLE, backend_name, is_checked
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.sparse_bucket import SparseBucket
from tritonddp.comm.run import ReductionRun
from tritonddp.comm.sparse import exchange
from tritonddp.coordination import collectives
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted

# Up to so many bytes two ranks send each other a bucket directly. Above, the ring is no slower: it
# adds half as much on each rank. The limit holds for the last buckets together, whose exchange no
# backward hides, so that memory is bounded; and for the first bucket.
_DIRECT = 256 * 1024


class AllReduce:
    """One SUM all-reduce per bucket.

    The factor ``1 / world_size`` is fused into the flatten kernel: SUM, unlike AVG, stays open to
    every NCCL algorithm, and a pre-scaled sum does not overflow in half precision. A weighted mean
    ``sum_r(w_r g_r) / sum_r(w_r)`` takes ``w_r / world_size`` there and ``world_size / sum_r(w_r)``
    in the unflatten kernel: the weights are in the headers of the ranks. For a mean over the ranks
    that have inputs, the headers hold the number of those ranks too.

    gloo's all-reduce is a ring of ``2 * (world_size - 1)`` rounds, each of which waits for a thread
    of another process to wake. The time of a small bucket is that of the rounds alone. So each rank
    sends small buckets directly to every other rank: one round, after which all ranks add in the
    same order. While in flight, such a bucket takes ``2 * world_size`` times its memory.

    Attributes:
        announce: called before a bucket goes through the process group, for ranks that may expect
            another one through shared memory; see :mod:`tritonddp.comm.peer_memory`. ``None`` if no
            rank does.
    """

    averages = True
    announce: Callable[[Bucket], None] | None = None

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group = group
        self._counters = counters
        self._process_group = group.process_group
        self._options = dist.AllreduceOptions()
        # A plain process group is called without Python code, and its work objects need no wrapper.
        self._is_plain = type(group.process_group) is dist.ProcessGroup
        self._to_all = dist.AllToAllOptions()
        self._most_direct = _DIRECT // (group.size - 1) ** 2 if goes_by_messages(group) else 0

    def launch(self, run: ReductionRun, bucket: Bucket, is_broken: bool = False) -> None:
        """See :meth:`Transport.launch`."""
        if self.announce is not None:
            announce, self.announce = self.announce, None
            with Uninterrupted():
                announce(bucket)
                try:
                    self.launch(run, bucket, is_broken)
                finally:
                    self.announce = announce
            return
        counters, nbytes, size = self._counters, bucket.nbytes, self._group.size
        counters.collectives += 1
        counters.wire_bytes += nbytes
        if run.is_logged:
            run.log(bucket, "is sent with NaN" if is_broken else "is sent")
        data, group = bucket.flat.data, self._process_group
        try:
            # Python handles signals between two instructions. So one instruction both launches the
            # collective and appends its work.
            if bucket.direct_nbytes <= self._most_direct and data.is_cpu:
                counters.sent_bytes += (size - 1) * nbytes
                sent, came = data.new_empty(2, size, data.numel()).unbind()
                sent.copy_(data)
                run.from_ranks = run.from_ranks or {}
                run.from_ranks[bucket.index] = came
                all_to_all = getattr(group, ALL_TO_ALL_SINGLE)
                run.works.extend(map(all_to_all, (came,), (sent,), ([],), ([],), (self._to_all,)))
                return
            counters.sent_bytes -= -2 * (size - 1) * nbytes // size
            if self._is_plain:
                run.works.extend(map(group.allreduce, ([data],), (self._options,)))
            else:
                with Uninterrupted():
                    run.works.append(collectives.all_reduce(data, self._process_group))
        except RuntimeError as error:
            raise run.explain(bucket, error) from error

    def wait(self, run: ReductionRun, bucket: Bucket) -> Tensor | None:
        """See :meth:`Transport.wait`."""
        try:
            run.works[bucket.index].wait()
        except RuntimeError as error:
            raise run.explain(bucket, error) from error
        if run.is_logged:
            # On a GPU the host goes on before the sum is there.
            is_there = bucket.flat.data.is_cpu
            run.log(bucket, "is reduced" if is_there else "is waited for by the device")
        if run.from_ranks and bucket.index in run.from_ranks:
            data = bucket.flat.data
            first, second, *others = run.from_ranks[bucket.index].unbind()
            torch.add(first, second, out=data)
            for other in others:
                data.add_(other)
            del run.from_ranks[bucket.index]
        flat, last = bucket.flat, bucket.last_trailer
        # The address is read each time: share_memory() moves gradients that are views.
        if (
            last is not None
            and last[0] is run.header
            and string_at(flat.trailer.data_ptr(), flat.trailer_nbytes) == last[1]
        ):
            flat.known_flags = last[2]
            return None
        factor = run.read_trailer(bucket, run.works[0] if self._is_plain else None)
        if isinstance(bucket, SparseBucket):
            exchange_rows(run, bucket, self._counters)
        return factor


def goes_by_messages(group: Group) -> bool:
    """Whether direct messages may replace all-reduces on the CPU; the same on all ranks.

    (In debug mode they may not: torch then compares sizes between ranks, of all-reduces only.)
    """
    process_group, device = group.process_group, torch.device("cpu")
    return (
        group.size > 1
        and type(process_group) is dist.ProcessGroup
        and backend_name(process_group, device) == "gloo"
        and not is_checked(process_group, device)
    )


def exchange_rows(run: ReductionRun, bucket: SparseBucket, counters: Counters) -> None:
    """The second step of sparse gradients, after the all-reduce of the buffer.

    Raises:
        RuntimeError: see :meth:`Transport.wait`.
    """
    run.agreement.check_pending()  # after a mismatch the announced row counts are meaningless
    if bucket.index in run.exchanged:  # already done, before an interrupt
        return
    try:
        with Uninterrupted():
            exchange(bucket, run.group.process_group, counters)
            run.exchanged = {*run.exchanged, bucket.index}
    except RuntimeError as error:
        raise run.explain(bucket, error, "exchange of sparse gradients") from error
