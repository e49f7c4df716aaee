"""Communication hooks: a function of the user decides how a bucket is reduced.

The hook gets the gradients of a bucket as one flat tensor, not divided by the number of ranks, and
returns a future of what shall be in their place. It never sees the trailer: the trailers of all
buckets travel together, in one small all-reduce behind the last hook.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tritonddp._torch import (
    backend_name,
    collectives_issued,
    future_types,
    hooks_of_one_collective,
    timeout_of,
)
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.sparse_bucket import SparseBucket
from tritonddp.comm.grad_bucket import GradBucket, bring_home, buffer_of, result_of, those_of_hooks
from tritonddp.comm.reduction import AllReduce, LocalError
from tritonddp.coordination import collectives
from tritonddp.coordination.agreement import Ballot
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import RollCall

# Holds flags and ballots of every wire dtype exactly.
_TRAILERS = torch.float32

# The group of the last backward over gloo, until the next one or the end. Callbacks of futures may
# hold it, as PowerSGD's do, and a thread of gloo lets go of them some time after the result is
# there. A thread that is then the last to hold its group would take it apart, itself included,
# which aborts the process.
_last_group: list[dist.ProcessGroup] = []
atexit.register(_last_group.clear)

Hook = Callable[[Any, GradBucket], Any]


class HookError(LocalError):
    """A communication hook failed on this rank. All collectives of the backward were made."""


class HookReduction(AllReduce):
    """Reduces each bucket by ``hook(state, bucket)``, which divides by the number of ranks itself.

    Hooks are called in bucket order. On a GPU, over NCCL, that is when a bucket is full. Over gloo
    a hook whose callbacks issue further collectives would race, from gloo's threads, with those of
    the next bucket and with whatever else the backward sends: there only hooks that are known to
    issue no more than one collective are called then. All others are called at the end of the
    backward, each when the one before it is done.

    Sparse gradients do not go through hooks: they are averaged as without one.

    An error in a hook is raised when all hooks have been called, so that the ranks stay in step. A
    rank that fails, or whose backward broke off, takes part with zeros, since NaN would stay in the
    state of hooks that feed errors back; but it tells the others, who see NaN in ``.grad``. What is
    no error (KeyboardInterrupt, SystemExit) goes on from there as it is. A future that is not
    completed within the timeout of the process group is an error of the hook.

    Args:
        hook: called with the state and a :class:`GradBucket`; returns a future of one tensor with
            as many elements as the buffer, or of a list that holds it.
        state: handed to the hook.
        process_group, counters, roll_call: as in :class:`AllReduce`. Only the all-reduce of the
            trailers is counted.
        get_buckets: asked for all buckets of the backward.

    Attributes:
        plain: for gradients that no backward has put into a bucket, see :class:`Reduction`.
    """

    def __init__(
        self,
        hook: Hook,
        state: Any,
        process_group: dist.ProcessGroup,
        counters: Counters,
        roll_call: RollCall,
        get_buckets: Callable[[], Sequence[Bucket]],
    ) -> None:
        super().__init__(process_group, counters, roll_call)
        # Their buckets are made for the occasion: hooks that keep something for each bucket would
        # take them for others.
        self._plain = AllReduce(process_group, counters, roll_call)
        self._hook = hook
        self._state = state
        self._get_buckets = get_buckets
        self._issues_one = any(hook is known for known in hooks_of_one_collective())
        self._held: dict[int, tuple[Any, Any]] = {}  # names and shapes, by the bucket's index
        self._calls: list[_Call] = []
        self._trailers: tuple[Tensor, Work] | None = None  # of all buckets, on their way
        # By the index of the bucket, once all is known.
        self._factors: dict[int, Tensor | None] | None = None
        self._failure: BaseException | None = None  # the first on this rank

    @property
    def plain(self) -> AllReduce:
        """See :class:`Reduction`."""
        return self._plain

    def begin(self, ballot: Ballot, scale: float) -> None:
        """See :meth:`Reduction.begin`."""
        # The hook itself divides, by whatever number of ranks.
        ballot = dataclasses.replace(ballot, over_present=False)
        super().begin(ballot, scale * self._group.size())  # which is divided out again: exactly
        self._calls = []
        self._trailers = None
        self._factors = None
        self._failure = None

    def start(self, bucket: Bucket) -> Work:
        """See :meth:`Reduction.start`."""
        bucket.seal(self._ballots_of(bucket))
        return self._call(bucket, is_broken=False)

    def start_poisoned(self, bucket: Bucket) -> Work:
        """See :meth:`Reduction.start_poisoned`."""
        bucket.poison(self._ballots_of(bucket))
        bucket.flat.payload.zero_()
        return self._call(bucket, is_broken=True)

    def finish(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`Reduction.finish`.

        Raises:
            HookError: a hook failed on this rank; nothing has been written to ``.grad``. Or what it
            has raised, if that is no Exception.
        """
        self.discard(bucket, work)
        if self._failure is not None:
            raise self._failure
        assert self._factors is not None
        bucket.unflatten(self._factors[bucket.index])

    def discard(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`Reduction.discard`."""
        work.wait()
        if self._is_logged:
            self._log(bucket, "is back from the communication hook")
        if self._factors is None:
            self._agree()

    def settle(self) -> None:
        """See :meth:`Reduction.settle`."""
        super().settle()
        self._plain.settle()

    def _call(self, bucket: Bucket, is_broken: bool) -> _Call:
        holds = bucket.names, bucket.flat.layout.shapes
        if self._held.setdefault(bucket.index, holds) != holds:
            self._held[bucket.index] = holds
            _forget(self._state, bucket.index)
        if self._is_logged:
            what = "goes to the communication hook"
            self._log(bucket, f"{what} with zeros" if is_broken else what)
        call = _Call(bucket, is_broken, self._run, self._result, self._wait_for, self._issued)
        self._calls.append(call)
        if self._issues_one or backend_name(self._group, bucket.flat.data.device) == "nccl":
            call.begin()
        return call

    def _run(self, bucket: Bucket, buffer: Tensor) -> Any:
        """Call the hook."""
        is_last = bucket.index == those_of_hooks(self._get_buckets())[-1].index
        with torch.no_grad():
            future = self._hook(
                self._state, GradBucket(bucket.index, is_last, buffer, bucket.params)
            )
        if not isinstance(future, future_types()):
            raise TypeError(
                "the DDP communication hook's callback must return a torch.futures.Future object, "
                f"but got {type(future).__module__}.{type(future).__qualname__}"
            )
        return future

    def _result(self, future: Any, buffer: Tensor) -> Tensor:
        """What the hook's future holds, in the end."""
        if not future.done():
            ended = threading.Event()
            future.add_done_callback(lambda _: ended.set())
            timeout = timeout_of(self._group, buffer.device)
            limit = None if timeout is None else timeout.total_seconds()
            if not ended.wait(limit):
                raise TimeoutError(
                    "the future that it returned was not completed within the process group's "
                    f"timeout of {limit:g} s"
                )
        return result_of(future.wait(), buffer)

    def _issued(self) -> int:
        return collectives_issued(self._group)

    def _wait_for(self, last: _Call) -> None:
        """Bring this call to its end, and before it all that precede it."""
        for call in self._calls:
            call.end()
            if call is last:
                break

    def _agree(self) -> None:
        """All buckets have been started: end their calls, then reduce all trailers at once."""
        for call in self._calls:
            call.end()
            if call.error is not None and self._failure is None:
                self._failure = self._named(call.bucket, call.error)
        device = self._calls[0].bucket.flat.data.device
        if backend_name(self._group, device) == "gloo":
            _last_group[:] = [self._group]
        if self._trailers is None:
            # Nothing here may make the host wait for the device.
            broken = torch.zeros(len(self._calls), dtype=_TRAILERS, device=device)
            for number, call in enumerate(self._calls):
                if call.is_broken:
                    broken[number].fill_(1)
            message = torch.cat([*(call.trailer.to(device) for call in self._calls), broken])
            self._trailers = message, self._send(message)
        message, work = self._trailers
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explained_trailers(error) from (self._failure or error)
        sizes = [call.trailer.numel() for call in self._calls]
        *trailers, broken = message.split([*sizes, len(self._calls)])
        for call, trailer in zip(self._calls, trailers, strict=True):
            _trailer(call.bucket).copy_(trailer)
        self._look_at(self._calls[0].bucket.flat.ballots)
        factor = 1.0 if self._factor is None else self._factor
        factors = torch.where(broken > 0, torch.nan, factor).to(torch.float64)
        self._factors = {
            call.bucket.index: _factor_on(
                call.bucket.flat.data.device,
                factors[number : number + 1] * self._scale_of(call.bucket),
            )
            for number, call in enumerate(self._calls)
        }
        for call in self._calls:  # before a failure is raised on this rank
            self._exchange(call.bucket)
        self._calls = []  # or they would keep buckets whose time is over

    def _scale_of(self, bucket: Bucket) -> float:
        """By which the sum is to be multiplied. Hooks divide what they get."""
        return 1.0 / self._group.size() if isinstance(bucket, SparseBucket) else 1.0

    def _send(self, message: Tensor) -> Work:
        self._counters.collective(message.nbytes, self._group.size(), passes=2)
        try:
            return collectives.all_reduce(message, self._group)
        except RuntimeError as error:
            raise self._explained_trailers(error) from (self._failure or error)

    def _explained_trailers(self, error: RuntimeError) -> RuntimeError:
        return self._roll_call.explain(
            f"{self._where()}, buckets up to {self._calls[-1].bucket.title}",
            "all-reduce of their flags, behind the communication hooks",
            self._failure or error,
        )

    def _named(self, bucket: Bucket, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):
            return error
        failure = HookError(
            f"{self._where()}, {bucket.title}: the "
            f"communication hook failed: {type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return failure


class _Call:
    """The hook's work on one bucket: the ``Work`` of :class:`HookReduction`.

    Args:
        bucket: filled.
        is_broken: its gradients do not count.
        run: calls the hook with a bucket and its buffer.
        result: waits for what it returned, which is for this buffer.
        wait_for: brings this call to its end after those before it.
        issued: counts the collectives that this rank has issued.

    Attributes:
        trailer: what this rank says in the bucket's trailer. Saved before the hook is called, which
            may resize the buffer and write behind its end.
        error: what the hook raised on this rank.
    """

    def __init__(
        self,
        bucket: Bucket,
        is_broken: bool,
        run: Callable[[Bucket, Tensor], Any],
        result: Callable[[Any, Tensor], Tensor],
        wait_for: Callable[[_Call], None],
        issued: Callable[[], int],
    ) -> None:
        self.bucket = bucket
        self.is_broken = is_broken
        self.trailer = _trailer(bucket).to(_TRAILERS, copy=True)
        self.error: BaseException | None = None
        self._run = run
        self._result = result
        self._wait_for = wait_for
        self._issued = issued
        self._has_begun = False
        self._buffer: Tensor | None = None
        self._future: Any = None
        self._ended: Future | None = None  # for traces

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        self._wait_for(self)

    def get_future(self) -> Future:
        """See :meth:`Work.get_future`."""
        self._ended = self._ended or Future()
        return self._ended

    def begin(self) -> None:
        """Call the hook, once."""
        if self._has_begun:
            return
        self._has_begun = True
        if isinstance(self.bucket, SparseBucket):
            return
        issued = self._issued()
        self._try()
        if self.error is not None and self._issued() == issued:
            # The other ranks wait for what it has not sent: take part, if it can do with zeros.
            self.bucket.flat.payload.zero_()
            self._try()

    def _try(self) -> None:
        try:
            self._buffer = buffer_of(self.bucket)
            self._future = self._run(self.bucket, self._buffer)
        except BaseException as error:
            self._failed(error)

    def end(self) -> None:
        """Wait for the hook and put its result into the bucket, once."""
        self.begin()
        if self._buffer is not None:
            try:
                bring_home(self._result(self._future, self._buffer), self._buffer, self.bucket)
            except BaseException as error:
                self._failed(error)
            # Whatever still holds the bucket's memory when a backward begins keeps it.
            self._buffer = self._future = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _failed(self, error: BaseException) -> None:
        self.error = self.error or error
        self.is_broken = True
        self._buffer = self._future = None
        if self.bucket.flat.layout.marks is not None:  # NaN is what all ranks get for it
            trailer = _trailer(self.bucket)
            trailer.copy_(self.trailer)
            self.bucket.flat.mark(slice(None))
            self.trailer = trailer.to(_TRAILERS, copy=True)


def _trailer(bucket: Bucket) -> Tensor:
    return bucket.flat.data[bucket.flat.payload.numel() :]


def _factor_on(device: torch.device, factor: Tensor) -> Tensor | None:
    """A factor as ``Bucket.unflatten`` takes it: on the CPU 1 is worth a question."""
    if device.type == "cpu" and factor.item() == 1:
        return None
    return factor.to(device)


def _forget(state: Any, index: int) -> None:
    """A bucket of this index holds other parameters now: drop what PowerSGD keeps of the former.

    Its errors and factors, by index, would be added to what they do not belong to. Buckets change
    on all ranks in the same step, so that all begin anew alike.
    """
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        kept = getattr(state, name, None)
        if isinstance(kept, dict):
            kept.pop(index, None)
