"""The sum over ranks by one all-reduce a bucket."""

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

# Bytes that two ranks send each other directly. Above the ring is no slower, since it adds half as
# much on each rank. Of the last buckets together, so that memory is bounded and since no backward
# hides what they take; and of the first one.
_DIRECT = 256 * 1024


class AllReduce:
    """One SUM all-reduce a bucket.

    The factor ``1 / world_size`` is fused into the flatten kernel: SUM, unlike AVG, stays open to
    every NCCL algorithm, and a pre-scaled sum does not overflow in half precision. A weighted mean
    ``sum_r(w_r g_r) / sum_r(w_r)`` takes ``w_r / world_size`` there and ``world_size / sum_r(w_r)``
    in the unflatten kernel: the weights are in the headers of the ranks. So is the number of ranks
    that have inputs, for the mean over those.

    gloo's all-reduce is a ring of ``2 * (world_size - 1)`` rounds, each of which waits for a thread
    of another process to wake. Where messages are small those are all that they cost, and each rank
    sends them to every other one directly instead: one round, and the sum is made here, by all
    ranks in the same order. Such a bucket takes ``2 * world_size`` times its memory on its way.

    Attributes:
        announce: tells ranks that expect another bucket through memory that one comes this way; see
            :mod:`tritonddp.comm.peer_memory`. ``None`` where nobody does.
    """

    averages = True
    announce: Callable[[Bucket], None] | None = None

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group = group
        self._counters = counters
        self._process_group = group.process_group
        self._options = dist.AllreduceOptions()
        # Its work objects need no help, and a call of it no Python.
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
            # Python handles signals between two instructions. Here is but one from each call to the
            # note that it was made.
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
            # On a GPU the host goes on before it is there.
            is_there = bucket.flat.data.is_cpu
            run.log(bucket, "is there" if is_there else "is waited for by the device")
        if run.from_ranks and bucket.index in run.from_ranks:
            data = bucket.flat.data
            first, second, *others = run.from_ranks[bucket.index].unbind()
            torch.add(first, second, out=data)
            for other in others:
                data.add_(other)
            del run.from_ranks[bucket.index]
        flat, last = bucket.flat, bucket.last_trailer
        # The address is asked for each time: share_memory() moves gradients that are views.
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
    """Whether all-reduces on the CPU may be made of messages: on all ranks alike.

    (In debug mode torch compares the sizes of an all-reduce only.)
    """
    process_group, device = group.process_group, torch.device("cpu")
    return (
        group.size > 1
        and type(process_group) is dist.ProcessGroup
        and backend_name(process_group, device) == "gloo"
        and not is_checked(process_group, device)
    )


def exchange_rows(run: ReductionRun, bucket: SparseBucket, counters: Counters) -> None:
    """The second step of sparse gradients, when the buffer is reduced.

    Raises:
        RuntimeError: see :meth:`Transport.wait`.
    """
    run.agreement.check_pending()  # ranks that do not reduce the same have announced nothing of use
    if bucket.index in run.exchanged:  # before an interrupt
        return
    try:
        with Uninterrupted():
            exchange(bucket, run.group.process_group, counters)
            run.exchanged = {*run.exchanged, bucket.index}
    except RuntimeError as error:
        raise run.explain(bucket, error, "exchange of sparse gradients") from error
