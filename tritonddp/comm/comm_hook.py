"""Communication hooks: a user function that defines how a bucket is reduced.

The hook gets the gradients of a bucket as one flat tensor, not divided by the number of ranks, and
returns a future of the tensor that replaces them. It never sees the trailer (the used flags at the
end of a bucket, and in the first bucket the headers of the ranks): the trailers of all buckets are
sent together, in one small all-reduce after the last hook.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tritonddp._device import record_use
from tritonddp._torch import (
    FUTURE,
    backend_name,
    collectives_issued,
    hooks_of_one_collective,
    timeout_of,
)
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.exchange import BucketExchange
from tritonddp.comm.grad_bucket import GradBucket, buffer_of, result_of, write_back
from tritonddp.comm.reduction import ExchangeError, LocalError
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group

# Represents flags and headers of every wire dtype exactly.
_TRAILERS = torch.float32

# The process group of the last backward over gloo, until the next one or the exit. Callbacks of
# futures may hold the group, as PowerSGD's do. A gloo thread drops the callbacks some time after
# the result is ready. If it held the last reference, it would destroy the group and thus join
# itself, which aborts the process.
_last_group: list[dist.ProcessGroup] = []
atexit.register(_last_group.clear)

Hook = Callable[[Any, GradBucket], Any]


class HookError(LocalError):
    """A communication hook failed on this rank. All collectives of the backward were run."""


class CommHook:
    """Reduces each bucket with ``hook(state, bucket)``; the hook divides by the number of ranks.

    This object is the transport, and the exchange of every bucket, since all trailers are sent
    together.

    Hooks are called in bucket order. With NCCL, a hook is called as soon as its bucket is full.
    With gloo, the callbacks of a hook run on gloo's threads. If they issue further collectives,
    these race with the collectives of the next bucket, and with all others in the backward. With
    gloo, only hooks that are known to issue at most one collective are therefore called as soon as
    a bucket is full. All other hooks are called at the end of the backward, each after the previous
    call has completed.

    Sparse gradients bypass hooks, and are averaged as if no hook were registered.

    An error in a hook is raised after the hook has been called for all buckets, so that the
    collectives of the ranks match. A rank whose hook or backward failed contributes zeros, since
    NaN would stay in the state of hooks with error feedback. It reports the failure to the other
    ranks, whose ``.grad`` becomes NaN. A KeyboardInterrupt is raised unchanged. A future that does
    not complete within the timeout of the process group is an error of the hook. A future holds one
    tensor with as many elements as the buffer, or a list with one such tensor.
    """

    averages = False
    ends_in_order = False
    before_pack: Callable[[], None] | None = None
    sum_into = None

    def __init__(self, hook: Hook, state: Any, group: Group, counters: Counters) -> None:
        self.hook = hook
        self._state = state
        self._group = group
        self._counters = counters
        self._issues_one = any(hook is known for known in hooks_of_one_collective())
        self._held: dict[int, tuple[Any, Any]] = {}  # names and shapes, by bucket index
        self._last = 0  # index of the last bucket that uses the hook
        # State of one reduction.
        self._calls: list[_Call] = []  # for all buckets so far
        # Factors by bucket index, after the last all-reduce.
        self._factors: dict[int, Tensor | None] | None = None
        self._failure: HookError | None = None  # error on this rank, not raised yet

    def exchanges(self, buckets: Sequence[Bucket]) -> list[BucketExchange]:
        """See :meth:`Transport.exchanges`. All buckets share this object."""
        self._last = max((b.index for b in buckets if not b.storage.is_sparse), default=0)
        return [self] * len(buckets)

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        if bucket.index == 0:  # a reduction begins
            self._calls, self._factors, self._failure = [], None, None
        if is_broken:
            bucket.flat.payload.zero_()
        holds = bucket.names, bucket.flat.layout.shapes
        if self._held.setdefault(bucket.index, holds) != holds:
            self._held[bucket.index] = holds
            _forget(self._state, bucket.index)
        call = _Call(bucket, is_broken, self)
        self._calls.append(call)
        device = bucket.flat.data.device
        if self._issues_one or backend_name(self._group.process_group, device) == "nccl":
            call.begin()
        return call

    def wait(self, bucket: Bucket, work: Work) -> Tensor | None:
        """See :meth:`BucketExchange.wait`.

        Raises:
            HookError: the hook failed on this rank, for any bucket. Raised once.
        """
        for call in self._calls:  # in order, up to this bucket
            call.end()
            if call is work:
                break
        if self._factors is None:
            self._agree()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        assert self._factors is not None
        return self._factors[bucket.index]

    def drain(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`BucketExchange.drain`. Hooks are not notified."""

    def call(self, bucket: Bucket, buffer: Tensor) -> Any:
        """Call the hook and return its future."""
        is_last = bucket.index == self._last
        future = self.hook(self._state, GradBucket(bucket.index, is_last, buffer, bucket.params))
        if not isinstance(future, FUTURE):
            raise TypeError(
                "the DDP communication hook's callback must return a torch.futures.Future object, "
                f"but got {type(future).__module__}.{type(future).__qualname__}"
            )
        return future

    def issued(self) -> int:
        """Number of collectives that have been issued in the process group."""
        return collectives_issued(self._group.process_group)

    def result(self, future: Any, buffer: Tensor) -> Tensor:
        """Wait for the hook's future, and return the tensor in it."""
        # A single collective completes or fails on its own. A done callback costs a thread switch.
        if not self._issues_one and not future.done():
            ended = threading.Event()
            future.add_done_callback(lambda _: ended.set())
            timeout = timeout_of(self._group.process_group, buffer.device)
            limit = None if timeout is None else timeout.total_seconds()
            if not ended.wait(limit):
                raise TimeoutError(
                    f"its future did not complete within the process group's timeout of {limit:g} s"
                )
        return result_of(future.wait(), buffer)

    def _agree(self) -> None:
        """Complete the hook calls of all launched buckets, then reduce all trailers together."""
        calls = self._calls
        for call in calls:
            call.end()
            if call.error is not None and self._failure is None:
                self._failure = HookError(
                    f"rank {self._group.rank}, step {self._counters.reductions}, "
                    f"{call.bucket.title}: the communication hook failed: "
                    f"{type(call.error).__name__}: {call.error}"
                )
                self._failure.__cause__ = call.error
        device = calls[0].bucket.flat.data.device
        group, size = self._group.process_group, self._group.size
        if backend_name(group, device) == "gloo":
            _last_group[:] = [group]
        # Nothing here may make the host wait for the device.
        broken = torch.zeros(len(calls), dtype=_TRAILERS, device=device)
        for number, call in enumerate(calls):
            if call.is_broken:
                broken[number].fill_(torch.nan)
        message = torch.cat([*(call.trailer.to(device) for call in calls), broken])
        record_use(*(call.trailer for call in calls))  # allocated on the streams of gradients
        try:
            self._send(message).wait()
        except RuntimeError as error:
            raise ExchangeError(
                f"buckets up to {calls[-1].bucket.title}",
                "all-reduce of their flags, after the communication hooks",
            ) from self._failure or error
        sizes = [call.trailer.numel() for call in calls]
        *trailers, broken = message.split_with_sizes([*sizes, len(calls)])
        is_whole = broken.is_cpu and not any(broken.tolist())  # cheap to detect
        factors: Tensor | None = None
        if not is_whole or any(call.bucket.storage.is_sparse for call in calls):
            factors = broken.to(torch.float64).add(1)  # NaN where gradients are invalid
        found: dict[int, Tensor | None] = {}
        for number, call in enumerate(calls):
            flat = call.bucket.flat
            flat.trailer.copy_(trailers[number])
            factor: Tensor | None = None
            if factors is not None and (not is_whole or call.bucket.storage.is_sparse):
                factor = factors[number : number + 1].to(flat.data.device)
                if call.bucket.storage.is_sparse:
                    # Sparse gradients are sums. Hooks divide dense ones by the number of ranks.
                    factor = factor / size
            found[call.bucket.index] = factor
        self._factors = found
        calls.clear()  # so that they do not keep old buckets alive

    def _send(self, message: Tensor) -> Work:
        self._counters.collective(message.nbytes, self._group.size, passes=2)
        return self._group.begin_sum(message)


class _Call:
    """The call of the hook for one packed bucket."""

    def __init__(self, bucket: Bucket, is_broken: bool, hook: CommHook) -> None:
        self.bucket = bucket
        self.is_broken = is_broken  # its gradients are invalid
        # Trailer of this rank. Saved before the call, since a hook may resize the buffer, which
        # overwrites the trailer.
        self.trailer = bucket.flat.trailer.to(_TRAILERS, copy=True)
        self.error: BaseException | None = None  # error of the hook on this rank
        self._hook = hook
        self._has_begun = False
        self._buffer: Tensor | None = None
        self._future: Any = None
        self._ended: Future | None = None  # for traces

    def wait(self) -> None:
        """Do nothing: all calls have completed when the trailers are reduced."""

    def get_future(self) -> Future:
        self._ended = self._ended or Future()
        return self._ended

    def begin(self) -> None:
        """Call the hook, once."""
        if self._has_begun:
            return
        self._has_begun = True
        if self.bucket.storage.is_sparse:
            return
        issued = self._hook.issued()
        self._try()
        if self.error is not None and self._hook.issued() == issued:
            # The other ranks wait for the hook's collective: call it again, with zeros.
            self.bucket.flat.payload.zero_()
            self._try()

    def _try(self) -> None:
        try:
            self._buffer = buffer_of(self.bucket)
            self._future = self._hook.call(self.bucket, self._buffer)
        except BaseException as error:
            self._failed(error)

    def end(self) -> None:
        """Wait for the hook and put its result into the bucket, once."""
        self.begin()
        if self._buffer is not None:
            try:
                result = self._hook.result(self._future, self._buffer)
                write_back(result, self._buffer, self.bucket)
            except BaseException as error:
                self._failed(error)
            # Drop the references: if the memory of a bucket is still referenced at the next
            # backward, the bucket must leave it to the holder.
            self._buffer = self._future = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):  # the group becomes unusable
            raise error
        self.error = self.error or error
        self.is_broken = True
        self._buffer = self._future = None
        if self.bucket.checked is not None:  # all ranks get NaN for it
            trailer = self.bucket.flat.trailer
            trailer.copy_(self.trailer)
            self.bucket.note_not_finite()
            self.trailer = trailer.to(_TRAILERS, copy=True)


def _forget(state: Any, index: int) -> None:
    """Drop PowerSGD's state of the bucket with this index, whose parameters have changed.

    PowerSGD keeps errors and factors by index, and would apply them to the wrong parameters.
    Buckets change on all ranks in the same step, so all ranks drop the same state.
    """
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        kept = getattr(state, name, None)
        if isinstance(kept, dict):
            kept.pop(index, None)
