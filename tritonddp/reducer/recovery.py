"""All ranks make the same collectives, whatever has become of their backwards."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from tritonddp._torch import preserve_version_counters
from tritonddp.buckets.bucket import Bucket, GradientError
from tritonddp.comm.reduction import Reduction
from tritonddp.comm.run import reduce_at_once, take_part
from tritonddp.coordination.agreement import (
    Ballot,
    Disagreement,
    OutOfStep,
    Source,
    StructureMismatch,
    left_out_hash,
)
from tritonddp.coordination.failures import listed
from tritonddp.coordination.forks import refuse_inherited
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.features.weighted_mean import Weight
from tritonddp.reducer.state import Phase, ReducerState, reducers

logger = logging.getLogger("tritonddp.in_step")

# What gradients count on a rank that has none.
_NOTHING = Weight(0.0, is_sum=False)


class InStep(ReducerState):
    """What a :class:`~tritonddp.reducer.reducer.Reducer` does to stay in step with other ranks."""

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
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "%s: a reduction begins: %s, %s, hash of what is trained %s, buckets left out: %s",
                self._where(),
                source.words,
                "no weight" if items is None else f"weight {items:g}",
                structure.hex(),
                list(left_out) or "none",
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
            for bucket, work in self._in_flight:
                # Where the ranks have not sent as many buckets, that takes the group's timeout.
                said = str(error) or "the ranks reduce different parameters"
                what = f"all-reduce of {bucket.nbytes} bytes ({said})"
                with self._roll_call.naming(f"{self._where()}, {bucket.title}", what):
                    work.wait()
            if isinstance(error, Disagreement):
                raise RuntimeError(f"{self._where()}, bucket 0: {error}") from None
            self._roster.verify(self._where(), named_params)

    # After a reduction

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
        self._renumber(self.arrangement.renew())
        if failure is not None:
            raise failure

    def _renumber(self, former: Sequence[int | None] | None) -> None:
        """Parameter ``i`` was ``former[i]`` until now, or is new; ``None`` if all are as before."""
        if former is None:
            return
        self._unannounced.renumber(former)
        self._constancy.renumber(former)
        earlier = self._used_earlier
        self._count_anew()
        # (Where a backward was reduced, it ends the window.)
        self._used_earlier = [old is not None and earlier[old] for old in former]

    def _take_up(self, source: Source) -> None:
        """Reduce the gradients of parameters that were added, in buckets of their own."""
        self._reduction.settle()
        params = [param for _, param in self._roster.added]
        broadcast = self._broadcast()
        if broadcast is not None:
            # Mostly of values that are alike already: a graph that is kept may be used again.
            with preserve_version_counters(params):
                names = [name for name, _ in self._roster.added]
                broadcast(
                    [param.detach() for param in params],
                    f"step {self.counters.reductions}",
                    f"parameters that were added ({listed(names)})",
                )
        buckets = self._wire.buckets(Bucket, Bucket)
        placement = self.arrangement.place(self._roster.added, buckets)
        weight = _NOTHING if source.is_empty else self._window.weight
        reduction = self._reduction.plain
        self._begin_reduction(source, weight, self._roster.structure, reduction=reduction)
        if source is Source.BROKEN:
            take_part(placement, reduction)
        elif source.is_empty:
            reduce_at_once(placement, reduction, [False] * len(params))
            self._finite.look_at(placement.buckets)
        else:
            self._window.merge(params)
            used = [self._roster.has_new_gradient(param) for param in params]
            self._window.divide(params, used)
            reduce_at_once(placement, reduction, used)
            self._finite.look_at(placement.buckets)

    # After a backward that broke off

    def _recover_all(self) -> None:
        """If a backward broke off, of this reducer or another one of the group, make up for it.

        Of another one too, since collectives of a group are matched by their order.

        Raises:
            RuntimeError: this process is no rank of the group, but was forked from one.
        """
        refuse_inherited(self._group)
        for reducer in sorted(reducers[self._group], key=lambda each: each._roster.number):
            reducer._recover()

    def _recover(self) -> None:
        """If the last backward broke off with an exception: leave no collective half-done.

        The other ranks will issue, or have issued, all collectives of that step. This rank takes
        part in those it has not launched yet, with NaN, so that the next step starts in step.
        """
        if self._in_context is not None:
            self._recover_in_context()
        if self._phase in (Phase.IDLE, Phase.DETACHED) or self._end_is_queued() is not None:
            return
        if self._phase is Phase.UNFINISHED:
            return  # all its collectives have been issued
        if self._phase is Phase.LOCAL:
            self._phase = Phase.IDLE
            return
        unsent = {bucket.index for bucket in self.buckets[self._next :]}.difference(self._left_out)
        logger.warning(
            "%s: the last backward did not come to its end%s",
            self._where(),
            # Of those that were, a communication hook may have failed.
            f". On the other ranks gradients are NaN in this step in {len(unsent)} of "
            f"{len(self.buckets)} buckets, which had not been sent"
            if unsent
            else "",
        )
        with Uninterrupted():
            self._make_up()

    def _make_up(self) -> None:
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
        # A rank that follows goes on: there is no backward here that a user could repeat.
        with self._finite.telling(self._where, raises=False):
            with Uninterrupted(), torch.no_grad(), self._naming_disagreements():
                unused = [False] * len(self.placement.params)
                reduce_at_once(self.placement, self._reduction, unused)
                self._reduction.settle()
                self._finite.look_at(self.buckets)
                self._roster.agreed()
                self._rearrange(source)
            for bucket in self.buckets:
                bucket.release()
