"""What a reducer does while no backward runs: before a forward, after a reduction, in its stead."""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp._compat import (
    preserve_version_counters,
    register_post_accumulate_grad_hook,
    steps_optimizers,
)
from tritonddp.arrangement import Arrangement
from tritonddp.assignment import BucketCaps
from tritonddp.at_once import reduce_at_once, take_part
from tritonddp.attendance import Attendance
from tritonddp.ballot import (
    Ballot,
    Disagreement,
    OutOfStep,
    Source,
    StructureMismatch,
    left_out_hash,
)
from tritonddp.bucket import Bucket, GradientError
from tritonddp.comm.grad_bucket import GradBucket
from tritonddp.comm.hooks import Hook, HookReduction
from tritonddp.comm.optimizers import SteppingReduction, take_over
from tritonddp.comm.reduction import AllReduce, Reduction, Work
from tritonddp.counters import Counters
from tritonddp.delayed import Gate
from tritonddp.lazy_bucket import LazyBucket, LazyViewBucket
from tritonddp.mixed_precision import buckets_on_the_wire
from tritonddp.outputs import Forward, Outputs
from tritonddp.participation import Constancy, Unannounced, as_trainable
from tritonddp.placement import Placement
from tritonddp.readiness import Readiness
from tritonddp.roll_call import RollCall
from tritonddp.roster import Roster
from tritonddp.stock_reducer import StockReducerNames
from tritonddp.view_bucket import ViewBucket
from tritonddp.weighting import Weight, Window

logger = logging.getLogger(__name__)

# What gradients count on a rank that has none.
_NOTHING = Weight(0.0, is_sum=False)

# Those that are alive, by process group.
_reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[BetweenBackwards]] = (
    weakref.WeakKeyDictionary()
)


class Phase(enum.Enum):
    """Where a reducer stands."""

    IDLE = "no backward runs"
    LOCAL = "a backward runs that only accumulates (no_sync)"
    OBSERVING = "the first reduced backward runs: note the order of gradients, launch at its end"
    REDUCING = "a backward runs, buckets are launched as they fill"
    UNFINISHED = "a backward is over, and finalize_backward() is to wait for its buckets"
    DETACHED = "hooks were removed: no backward is noticed any more"


class BetweenBackwards(ABC, StockReducerNames):
    """The state of a :class:`~tritonddp.reducer.Reducer`, and all of it but the backward itself.

    Args:
        roster: the parameters of the module, alike on every rank.
        process_group: the ranks to average over.
        caps: bucket sizes.
        attendance: which ranks have inputs.
        should_sync: asked when a backward starts: is it reduced, or does it only accumulate?
        weight: asked when a backward starts: how much it counts, ``None`` if as much as others.
        broadcast: asked when parameters were added: what overwrites them with those of one rank,
            ``None`` if each rank keeps its own.
        gradient_as_bucket_view: gradients live in the buckets.
        strict: an unused parameter is an error at the next forward.
        skip_unused: buckets without any used parameter are not sent.
        delay_until: the parameter whose gradient delayed ones (see :class:`BucketCaps`) wait for.
        wire_dtype: in which gradients travel, ``None`` for their own dtypes.
        lazy_buckets: buckets have memory during backwards only.

    Attributes:
        counters: what was launched and sent so far.
        forwards: how many began so far, with gradients.
        arrangement: which buckets there are.
        num_buckets_reduced: in the last backward.
        is_traced: inside ``trace()``.
        on_backward: for measurements: called when a backward begins, with what is to run at its
            end; each returns what runs instead.
    """

    def __init__(
        self,
        roster: Roster,
        process_group: dist.ProcessGroup,
        caps: BucketCaps,
        attendance: Attendance,
        should_sync: Callable[[], bool],
        weight: Callable[[], Weight | None] = lambda: None,
        broadcast: Callable[[], Callable[[list[Tensor]], None] | None] = lambda: None,
        gradient_as_bucket_view: bool = False,
        strict: bool = False,
        skip_unused: bool = False,
        delay_until: Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
        lazy_buckets: bool = False,
    ) -> None:
        self.counters = Counters()
        self.forwards = 0
        self.num_buckets_reduced = 0
        self.is_traced = False
        self.on_backward: list[Callable[[Callable[[], None]], Callable[[], None]]] = []
        self._roster = roster
        self._group = process_group
        self._attendance = attendance
        self._should_sync = should_sync
        self._weight = weight
        self._broadcast = broadcast
        self._strict = strict
        self._skip_unused = skip_unused
        self._finalizes_on_request = False
        self._left_out: list[int] = []  # buckets that are not sent in this backward
        self._caps = caps
        self._gate = None if delay_until is None else Gate(delay_until, self)
        self._roll_call = RollCall(process_group)
        self._reduction: Reduction = AllReduce(process_group, self.counters, self._roll_call)
        self._run_hook: Callable[[GradBucket], Any] | None = None
        self._steps = False  # are there optimizers that step in the backward?
        self._steps_in_hook = False

        self._phase = Phase.IDLE
        self._graph_task = -1
        self._creates_graph = False
        self._end_is_queued: Callable[[], object] = lambda: None
        self._outputs = Outputs(self)
        self._window = Window(lambda: [param for _, param in roster.params])
        self._next = 0  # first bucket that is not launched
        self._in_flight: list[tuple[Bucket, Work]] = []
        self._hooks_of_added: list[Any] = []
        self._post_backward: list[torch.futures.Future] = []
        _reducers.setdefault(process_group, weakref.WeakSet()).add(self)
        self._unused_error: str | None = None
        self._launching = threading.Lock()
        self._readiness = Readiness((), (), self)
        # Parameters reached in this backward, and in those under no_sync since the last reduction:
        # they take part in the next.
        self._used: list[bool] = []
        self._used_earlier: list[bool] = []
        self._unannounced = Unannounced()
        self._constancy = Constancy()
        copying: type[Bucket] = LazyBucket if lazy_buckets else Bucket
        views: type[Bucket] = LazyViewBucket if lazy_buckets else ViewBucket
        bucket_class: Callable[..., Bucket] = views if gradient_as_bucket_view else copying
        if wire_dtype is not None:
            bucket_class = buckets_on_the_wire(wire_dtype, bucket_class, copying)
        self.arrangement = Arrangement(
            roster, process_group, caps, bucket_class, self.counters, self._roll_call
        )
        self._count_anew()

    @property
    def placement(self) -> Placement:
        """The buckets, and where in them each parameter is."""
        return self.arrangement.placement

    @property
    def params(self) -> list[Parameter]:
        """All whose gradients are reduced."""
        return self._all_params()

    @property
    def structure(self) -> bytes:
        """A hash of what is trained, which should be alike on all ranks."""
        return self._roster.structure

    def held(self) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Tensor]]]:
        """Parameters and buffers that should be alike on all ranks, trainable or not."""
        return self._roster.params, self._roster.buffers()

    @property
    def buckets(self) -> list[Bucket]:
        """In launch order."""
        return self.placement.buckets

    def _all_params(self) -> list[Parameter]:
        return [*self.placement.params, *(param for _, param in self._roster.added)]

    def _where(self) -> str:
        return f"rank {self._group.rank()}, step {self.counters.reductions}"

    # What hooks call during a backward: see Reducer

    @abstractmethod
    def begin(self, forward: Forward | None = None) -> None: ...

    @abstractmethod
    def gradient_ready(self, index: int) -> None: ...

    @abstractmethod
    def segment_full(self, number: int) -> None: ...

    @abstractmethod
    def gate_opens(self) -> None: ...

    # Before a forward

    def prepare_for_forward(self) -> None:
        """See that the last backward came to its end, and what has become of the parameters.

        Raises:
            NotImplementedError: a parameter was added that cannot be reduced.
            RuntimeError: in strict mode, with gradients, the last backward left parameters unused;
                or the ranks did not reduce the same (on a GPU, where the backward itself does not
                wait for the answer).
        """
        if self._phase is Phase.DETACHED:
            return
        if torch.is_grad_enabled():
            self._check_finalized()
        self._recover_all()
        self._settle()
        self._wait_post_backward()
        if torch.is_grad_enabled():
            self.forwards += 1
            self._look()
            if self._unused_error is not None:
                message, self._unused_error = self._unused_error, None
                raise RuntimeError(message)

    def _look(self) -> None:
        """See what has become of the parameters."""
        if self._roster.look(self._where):
            _remove_all(self._hooks_of_added)
            # A backward may reach nothing else that has a hook of ours.
            added = [param for _, param in self._roster.added]
            with as_trainable(added):
                self._hooks_of_added = [
                    register_post_accumulate_grad_hook(param, _gradient_hook(weakref.ref(self)))
                    for param in added
                ]
        if take_over(param for _, param in self._roster.params) and not self._steps:
            self._steps = True
            if not self._steps_in_hook:
                self._reduction = SteppingReduction(self._reduction)

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """A forward has returned ``outputs``."""
        self._outputs.watch(outputs, self.counters.reductions)

    def missing(self) -> list[Parameter]:
        """Parameters that the last reduced backward has not reached."""
        return [self.placement.params[number] for number in self._constancy.missing or ()]

    def _check_finalized(self) -> None:
        if self._phase is Phase.UNFINISHED:
            raise RuntimeError(
                f"{self._where()}: Expected to have finalized the prior backward pass before "
                "starting a new one. Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is true."
            )

    def _check_reducer_finalized(self) -> None:
        """Raise what the next forward would raise, or make up for.

        Raises:
            RuntimeError: the last backward has not come to its end, or has left parameters unused
                in strict mode.
        """
        if self._phase not in (Phase.IDLE, Phase.DETACHED):
            runs = self._end_is_queued() is not None
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                f"one. {self._where()}: a backward {'still runs' if runs else 'broke off'}. The "
                "next forward takes care of what it has left."
            )
        if self._unused_error is not None:
            raise RuntimeError(self._unused_error)

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future]) -> None:
        """Wait for these at the end of the next backward, or before the next forward.

        They come from hooks for buffers.
        """
        self._post_backward.extend(futures)

    def _wait_post_backward(self) -> None:
        if self._post_backward:
            futures, self._post_backward = self._post_backward, []
            torch.futures.wait_all(futures)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have ``hook`` reduce the buckets of all backwards from now on.

        Args:
            state: handed to the hook.
            hook: see :class:`~tritonddp.comm.hooks.HookReduction`.

        Raises:
            RuntimeError: there is one already, a backward or a trace is under way, or a backward
                waits for ``finalize_backward()``.
        """
        if self._run_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if self.is_traced or self._end_is_queued() is not None:
            raise RuntimeError(
                f"{self._where()}: a communication hook cannot be registered during a backward, "
                "or inside trace()"
            )
        self._check_finalized()
        self._recover_all()
        self._settle()
        arrangement = self.arrangement
        reduction = HookReduction(
            hook,
            state,
            self._group,
            self.counters,
            self._roll_call,
            lambda: arrangement.placement.buckets,
        )
        self._run_hook = lambda bucket: hook(state, bucket)
        self._steps_in_hook = steps_optimizers(hook)
        steps = self._steps and not self._steps_in_hook
        self._reduction = SteppingReduction(reduction) if steps else reduction

    def _remove_autograd_hooks(self) -> None:
        """Let go of the parameters for good, without waiting for any other rank."""
        self._phase = Phase.DETACHED
        self._readiness.remove()
        _remove_all(self._hooks_of_added)
        self._in_flight.clear()
        _reducers[self._group].discard(self)

    # What the ranks say to each other

    def _begin_reduction(
        self,
        source: Source,
        weight: Weight | None,
        structure: bytes,
        left_out: Sequence[int] = (),
        reduction: Reduction | None = None,
    ) -> None:
        """Tell the reduction what this rank says to the others, and how much its means count."""
        self._attendance.is_due = False
        items = None if weight is None else weight.items
        ballot = Ballot(
            structure, source, items, left_out_hash(left_out), self._attendance.mean_over_present
        )
        reduction = reduction or self._reduction
        reduction.begin(ballot, 1.0 if weight is None else weight.scale)

    def _settle(self) -> None:
        with self._naming_disagreements():
            self._reduction.settle()

    @contextmanager
    def _naming_disagreements(
        self, named_params: Sequence[tuple[str, Parameter]] | None = None
    ) -> Iterator[None]:
        """Ranks that do not reduce the same: the error, when nothing is under way any more.

        Args:
            named_params: what is reduced on request, ``None`` in a backward.
        """
        try:
            yield
        except OutOfStep:  # what is under way may never end
            here = [bucket.title for bucket in self.buckets if bucket.index in self._left_out]
            raise RuntimeError(
                f"{self._where()}, bucket 0: skip_all_reduce_unused_params=True needs parameters "
                "that are unused on all ranks alike, but the ranks leave out different buckets. "
                f"Here these are left out: {', '.join(here) or 'none'}. The process group is of "
                "no use any more: leave skip_all_reduce_unused_params off"
            ) from None
        except (Disagreement, StructureMismatch) as error:
            for _, work in self._in_flight:
                work.wait()
            if isinstance(error, Disagreement):
                raise RuntimeError(f"{self._where()}, bucket 0: {error}") from None
            self._roster.verify(self._where(), named_params)

    # After a reduction

    def _reset(self) -> None:
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.release()
        self._filled = [False] * len(self.placement.places)
        self._readiness.forget()
        self._used_earlier = [False] * len(self._used_earlier)
        self._window.clear()
        self._phase = Phase.IDLE

    def _rearrange(self, source: Source = Source.ELSEWHERE) -> None:
        """After a reduction: buckets follow the order of gradients, and hold what is trainable.

        Every rank that took part in that reduction is here, so the collectives here match.

        Args:
            source: of this rank's gradients. After a backward that broke off, or none at all, it
                has none to offer.
        """
        missing: Collection[int] | None = None
        if self.arrangement.is_provisional:
            missing = self.arrangement.agree_on_order(self._where, self._attendance.source_rank)
            if source.is_empty:
                missing = ()
        self._unannounced.stayed_away(missing)
        failure: GradientError | None = None
        if self._roster.added:
            try:
                self._take_up(source)
            except GradientError as error:  # of this rank alone: the others go on
                failure = GradientError(f"{self._where()}: {error}")
        former = self.arrangement.renew()
        if former is not None:
            self._unannounced.renumber(former)
            self._constancy.renumber(former)
            earlier = self._used_earlier
            self._count_anew()
            # (Where a backward was reduced, it ends the window.)
            self._used_earlier = [old is not None and earlier[old] for old in former]
        if failure is not None:
            raise failure

    def _take_up(self, source: Source) -> None:
        """Reduce the gradients of parameters that were added, in buckets of their own."""
        self._reduction.settle()
        params = [param for _, param in self._roster.added]
        broadcast = self._broadcast()
        if broadcast is not None:
            # Mostly of values that are alike already: a graph that is kept may be used again.
            with preserve_version_counters(params):
                broadcast([param.detach() for param in params])
        placement = self.arrangement.place(self._roster.added)
        weight = _NOTHING if source.is_empty else self._window.weight
        reduction = self._reduction.plain
        self._begin_reduction(source, weight, self._roster.structure, reduction=reduction)
        if source is Source.BROKEN:
            take_part(placement, reduction)
        elif source.is_empty:
            reduce_at_once(placement, reduction, [False] * len(params))
        else:
            self._window.merge(params)
            used = [self._roster.has_new_gradient(param) for param in params]
            self._window.divide(params, used)
            reduce_at_once(placement, reduction, used)

    def _count_anew(self) -> None:
        """Lists and hooks by the numbers of the present placement."""
        params = self.placement.params
        self._used = [False] * len(params)
        self._used_earlier = [False] * len(params)
        self._filled = [False] * len(self.placement.places)  # per segment
        self._unfilled = [0] * len(self.buckets)  # segments that wait for gradients
        self._roster.place(self.placement.names, params)
        _remove_all(self._hooks_of_added)
        self._readiness.remove()
        segments = [range(place.first, place.last) for place in self.placement.places]
        with as_trainable(params):
            self._readiness = Readiness(params, segments, self)

    # After a backward that broke off

    def _recover_all(self) -> None:
        """If a backward broke off, of this reducer or another one of the group, make up for it.

        Of another one too, since collectives of a group are matched by their order.
        """
        for reducer in sorted(_reducers[self._group], key=lambda each: each._roster.number):
            reducer._recover()

    def _recover(self) -> None:
        """If the last backward broke off with an exception: leave no collective half-done.

        The other ranks will issue, or have issued, all collectives of that step. This rank takes
        part in those it has not launched yet, with NaN, so that the next step starts in step.
        """
        if self._phase in (Phase.IDLE, Phase.DETACHED) or self._end_is_queued() is not None:
            return
        if self._phase is Phase.UNFINISHED:
            return  # all its collectives have been issued
        if self._phase is Phase.LOCAL:
            self._phase = Phase.IDLE
            return
        logger.warning("%s: the last backward did not come to its end", self._where())
        try:
            if self._next == 0:
                self._begin_reduction(Source.BROKEN, None, self._roster.structure, self._left_out)
            with torch.no_grad():
                while self._next < len(self.buckets):
                    bucket = self.buckets[self._next]
                    if bucket.index not in self._left_out:
                        self._in_flight.append((bucket, self._reduction.start_poisoned(bucket)))
                    self._next += 1
                with self._naming_disagreements():
                    for bucket, work in self._in_flight:
                        self._reduction.discard(bucket, work)
                    self._in_flight.clear()
                    self._roster.agreed()
                    self._rearrange(Source.BROKEN)
        finally:
            self._reset()

    # Instead of a backward

    def prepare_to_follow(self) -> None:
        """No forward follows: see that the last backward came to its end, as if one did.

        Raises:
            RuntimeError: it waits for ``finalize_backward()``; or see :meth:`prepare_for_forward`.
        """
        self._check_finalized()
        self._wait_post_backward()
        self._recover_all()
        self._settle()
        self._look()

    def follow(self, source: Source) -> None:
        """Make the collectives of a reduced backward, of which this rank has none.

        Its gradients count as zero. Those of the other ranks come into ``.grad`` here too.

        Args:
            source: why it has none.
        """
        self._settle()
        self._roster.enroll()
        self.counters.reductions += 1
        self.arrangement.reduction_begins()
        self._begin_reduction(source, _NOTHING, self._roster.structure)
        with torch.no_grad(), self._naming_disagreements():
            unused = [False] * len(self.placement.params)
            reduce_at_once(self.placement, self._reduction, unused)
            self._reduction.settle()
            self._roster.agreed()
            self._rearrange(source)
        for bucket in self.buckets:
            bucket.release()


def _gradient_hook(reducer: weakref.ref[BetweenBackwards]) -> Callable[[Tensor], None]:
    """Hook on a parameter that is in no bucket yet."""

    def gradient_came(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.begin()

    return gradient_came


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
