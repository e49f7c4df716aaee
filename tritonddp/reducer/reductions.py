"""The reductions of one wrapper: what all of them need, whether a backward runs or not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import is_capturing
from tritonddp._torch import preserve_version_counters
from tritonddp.buckets.assignment import BucketCaps
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.formats import BucketFactory, WireFormat
from tritonddp.buckets.manager import BucketManager
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.broadcast import StateBroadcast, bytes_of
from tritonddp.comm.process_group import ProcessGroupTransport
from tritonddp.comm.reduction import Reduction
from tritonddp.comm.transport import TransportChoice
from tritonddp.coordination.agreement import (
    NOTHING,
    Agreement,
    Disagreement,
    Displaced,
    GradSource,
    Mismatch,
    SkippedMismatch,
    Weight,
)
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.reducer import capture
from tritonddp.reducer.extension import Events
from tritonddp.reducer.graph.backward import Forwards, SyncState
from tritonddp.reducer.graph.participation import ReentrantGrads
from tritonddp.reducer.options import ReducerOptions
from tritonddp.reducer.statistics import Statistics

logger = logging.getLogger("tritonddp.in_step")


class Reductions:
    """Opens reductions, and does what follows one: new buckets, added parameters, errors.

    Args:
        parameters: of the module, the same on every rank.
        group: the ranks to average over.
        caps: bucket sizes.
        sync: settings of the next backward, written by the wrapper.
        broadcast: overwrites added parameters with those of one rank; ``None`` if each rank keeps
            its own.
        wire: the dtype and the compression in which gradients are sent.
        counters: count launches and bytes sent.
        views: ``.grad`` tensors are views of the buckets.
        lazy: buckets have memory during backwards only.
        check_finite: buckets record which gradients are not finite.
        transport: how gradients travel; by default through the process group.
        is_in_place: large gradients are reduced where they lie, where that is possible.
        divide_factor: sums of gradients are divided by it; ``None`` for the number of ranks.

    Attributes:
        parameters, group, sync, counters: see above.
        events: callbacks of extensions.
        agreement: writes and compares the headers of the ranks.
        manager: holds the buckets.
        memory: moves buckets to memory of the host; ``None`` if they stay with the process group.
        reentrant: parameters whose gradients come without announcement.
        statistics: facts about the steps so far.
        forwards: decides which backwards are reduced.
        afterwards: see :meth:`call_afterwards`.
        stepped_at: number of reductions when the owners of parameters have stepped last.
    """

    # A world of one takes the path of many: buckets are packed, sent and unpacked. For benchmarks
    # and tests alone, which set it on one object: no user gains from it.
    exchanges_alone = False

    def __init__(
        self,
        parameters: ModuleParameters,
        group: Group,
        caps: BucketCaps,
        sync: SyncState,
        broadcast: StateBroadcast | None = None,
        wire: WireFormat | None = None,
        counters: Counters | None = None,
        views: bool = False,
        lazy: bool = False,
        check_finite: bool = False,
        transport: TransportChoice | None = None,
        is_in_place: bool = False,
        divide_factor: float | None = None,
    ) -> None:
        self.counters = counters = counters or Counters()
        self.parameters = parameters
        self.group = group
        self.sync = sync
        self.events = Events()
        self.agreement = Agreement(group, divide_factor)
        wire = wire or WireFormat()
        transport = transport or TransportChoice()
        by_group = ProcessGroupTransport(group, counters)
        factory = BucketFactory(
            wire,
            group,
            counters,
            by_group,
            views,
            lazy,
            check_finite,
            transport.is_registered,
            is_in_place,
        )
        self.manager = BucketManager(parameters, group, caps, factory, counters)
        self.memory = transport.memory(group, by_group, counters)
        self.reentrant = ReentrantGrads()
        self.statistics = Statistics()
        self.forwards = Forwards()
        self._broadcast = broadcast
        self._known = {param for _, param in parameters.params}  # the ranks had them alike
        self.afterwards: Callable[[], None] | None = None
        self.stepped_at = -1

    def owners_have_stepped(self) -> None:
        """The owners of parameters have used all gradients that are reduced."""
        self.stepped_at = self.counters.reductions

    def call_afterwards(self, function: Callable[[], None]) -> None:
        """Call this on all ranks whenever a backward is reduced, or made up for."""
        self.afterwards = function

    def where(self) -> str:
        """This rank and its step, for messages."""
        return f"rank {self.group.rank}, step {self.counters.reductions}"

    def open(
        self,
        bucket_set: BucketSet,
        used: list[bool],
        source: GradSource,
        where: str = "",
        weight: Weight | None = None,
        schema: bytes | None = None,
        of_backwards: bool = True,
    ) -> Reduction:
        """A reduction that no running backward makes; see :class:`Reduction`."""
        if self.sync.join is not None and source is not GradSource.CHANGED:
            self.sync.join.reduction_begins()
        return Reduction(
            bucket_set,
            bucket_set.buckets,
            self.agreement,
            self.events,
            self.counters,
            used,
            source,
            where or self.where(),
            self.parameters.schema if schema is None else schema,
            self.sync.join,
            [False] * len(bucket_set.segments),
            [0] * len(bucket_set.buckets),
            weight=weight,
            of_backwards=of_backwards,
            earlier=used,  # no gradient is of before it
        )

    def temporary(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        views: bool = False,
        sparse: Collection[Tensor] | None = None,
    ) -> BucketSet:
        """See :meth:`BucketManager.temporary`."""
        self.announce_buckets()
        return self.manager.temporary(named_params, views, sparse)

    def own(self, owners: Mapping[Tensor, int]) -> None:
        """See :meth:`BucketManager.own`."""
        self.manager.own(owners)
        if not self.manager.is_provisional:
            self.move_buckets()

    def stay_with_process_group(self) -> None:
        """Do not move buckets to memory of the host any more."""
        if self.memory is not None:
            self.memory.leave()
            self.memory = None

    def announce_buckets(self) -> None:
        """Before a reduction of buckets that may still move: see :meth:`PeerMemory.begin`."""
        if self.memory is not None and self.manager.is_provisional:
            self.memory.begin(self.manager.current)

    def need_no_exchange(self, options: ReducerOptions) -> bool:
        """Whether the only rank needs no buckets: its gradients are the sum, divided by 1."""
        manager = self.manager
        wire = manager.factory.wire
        return (
            not self.exchanges_alone
            and self.agreement.divisor == 1
            and options.comm_hook is None
            and not options.finalizes_manually
            and self.sync.join is None
            and wire.reduce_dtype is None
            and wire.compression is None
            and not manager.is_provisional
            and not self.events.needs_buckets
            and not manager.current.needs_reduction
        )

    # After a reduction

    def complete(self, reduction: Reduction, arrived: Sequence[int] = ()) -> None:
        """Rebuild buckets if the order of gradients has changed, or parameters were frozen.

        Every rank that took part in this reduction calls this, so its collectives match. If ranks
        do not reduce the same, on a GPU, nothing is rebuilt: they all find that out at the end of
        the next reduction, which they make with the buckets that they have.

        Args:
            reduction: it is over.
            arrived: in a first backward, numbers of the parameters in the order of their gradients.
        """
        if not self.are_alike():
            return
        manager = self.manager
        missing: Collection[int] | None = None
        if manager.is_provisional:
            missing = manager.agree_on_order(arrived, self.where(), self.sync.source_rank)
            if reduction.source.is_empty:  # no backward of this rank could show what is missing
                missing = ()
        self.reentrant.stayed_away(missing)
        manager.renew()
        self.move_buckets()

    def move_buckets(self) -> None:
        """Move new buckets to memory of the host. All ranks call this at the same time."""
        if self.memory is not None and self.memory.is_due(self.manager.current):
            self.memory.move(self.manager.current, self.where())

    # Parameters that come and go

    @torch.no_grad()
    def take_up_parameters(
        self,
        in_backward: bool = False,
        requested: Sequence[tuple[str, Parameter]] | None = None,
    ) -> None:
        """Parameters have come or gone: all ranks build new buckets, alike.

        First they agree, by the header of a bucket that holds nothing else. A rank whose parameters
        are as before is in a reduction, whose first bucket this is: then all ranks raise. What has
        come gets the values of one rank.

        Args:
            in_backward: the values that this rank had before were used.
            requested: parameters of the reduction on request that such a rank makes, if it is one.

        Raises:
            RuntimeError: ranks have not changed alike. (On a GPU they all raise that at the end of
                the next reduction, which they make with the buckets that they have.)
        """
        parameters, manager = self.parameters, self.manager
        message = (
            "parameters were added or unfrozen, on which the ranks have to agree: run one step"
        )
        capture.refuse(manager.current, self.where(), f"{message} without a graph before")
        parameters.register()
        self.announce_buckets()
        with Uninterrupted():
            if self.group.size > 1:
                current = manager.current if requested is None else self.temporary(requested)
                asks = self.open(
                    current,
                    [False] * len(current.params),
                    GradSource.CHANGED,
                    # (A backward counts when it begins, a request not at all.)
                    f"rank {self.group.rank}, step {self.counters.reductions + (not requested)}",
                    schema=parameters.schema_of_change(),
                )
                try:
                    asks.ask()
                except Mismatch as error:
                    self.counters.reductions += requested is None  # the other ranks count it
                    try:
                        asks.take_part()
                    except Mismatch:
                        self.raise_mismatch(error, asks, requested)
                    return  # on a GPU
                new = [each for each in parameters.unplaced if each[1] not in self._known]
                if self._broadcast is not None and new:
                    self._send_values(new, in_backward)
            self._known = {param for _, param in parameters.params}
            parameters.commit()
            manager.place()
            if not manager.is_provisional:
                self.move_buckets()

    def _send_values(self, named: Sequence[tuple[str, Parameter]], are_used: bool) -> None:
        params = [param for _, param in named]
        own = [param.detach().clone() for param in params] if are_used else []
        # (The values are mostly equal already, so a graph that is kept may be used again.)
        with preserve_version_counters(params):
            assert self._broadcast is not None
            self._broadcast.send(
                [param.detach() for param in params],
                f"step {self.counters.reductions}",
                f"parameters that were added ({listed([name for name, _ in named])})",
            )
        pairs = zip(named, own, strict=False)
        others = [name for (name, p), each in pairs if not torch.equal(bytes_of(each), bytes_of(p))]
        if others:
            logger.warning(
                "%s: %s, used before any forward of the module found them, had other values than "
                "on rank %s, which all ranks have from now on. The gradients of this step are "
                "those of the other values: make such values alike, by the same seed say",
                *(self.where(), listed(others), self.sync.source_rank),
            )

    def before_make_up(self, reduction: Reduction) -> None:
        """Warn that :meth:`make_up` comes. It is still owed if this is cut short.

        Raises:
            RuntimeError: a CUDA graph is captured, and its replays would make up again.
        """
        capture.refuse(
            self.manager.current,
            self.where(),
            "the last backward did not come to its end, and the other ranks wait for its remaining "
            "buckets: run one step without a graph before",
        )
        buckets = reduction.buckets
        unsent = {each.index for each in buckets[len(reduction.works) :]}
        unsent.difference_update(reduction.skipped)
        logger.warning(
            "%s: the last backward did not come to its end%s",
            self.where(),
            # (In a bucket that was sent, a communication hook may have failed.)
            f". On ranks whose backward went on gradients are NaN in this step in {len(unsent)} of "
            f"{len(buckets)} buckets, which this rank had not sent"
            if unsent
            else "",
        )

    @torch.no_grad()
    def make_up(self, reduction: Reduction, arrived: Sequence[int]) -> None:
        """The backward of this reduction has failed on this rank: make its remaining collectives.

        The other ranks will launch, or have launched, all collectives of that step. This rank
        launches those that it has not launched yet, with NaN, so that later collectives match
        again. See also :meth:`complete`. The caller delays Ctrl-C.
        """
        try:
            if not reduction.works:
                reduction.break_off()
                self.announce_buckets()
            reduction.take_part()
            reduction.break_off()
            self.complete(reduction, arrived)
        except Mismatch as error:
            self.raise_mismatch(error, reduction)
        if self.afterwards is not None:
            self.afterwards()

    # Without a backward

    def shadow_backward(self, source: GradSource) -> None:
        """Make the collectives of a reduced backward; ``source`` says why this rank runs none.

        The gradients of this rank count as zero. Its ``.grad`` gets the mean, too.
        """
        capture.refuse(
            self.manager.current,
            self.where(),
            "this rank has no inputs, and a replay cannot take part in the reduction without them: "
            "use join() without a graph",
        )
        self.check_pending()
        self.parameters.register()
        self.counters.reductions += 1
        self.manager.reduction_begins()
        self.announce_buckets()
        current = self.manager.current
        shadow = self.open(current, [False] * len(current.params), source, weight=NOTHING)
        try:
            with Uninterrupted(), torch.no_grad():
                shadow.reduce_now()
                self.complete(shadow)
        except Mismatch as error:
            self.raise_mismatch(error, shadow)
        finally:
            for bucket in self.manager.current.to_release:
                bucket.release()
        for call in self.events.on_end:
            call(shadow)

    # Ranks that do not reduce the same

    def are_alike(self) -> bool:
        """Whether the ranks have reduced the same so far. All ranks find alike.

        Where they have not, on a GPU, it is an error at the end of the next reduction: on all
        ranks in the same, whatever made the last one on each.
        """
        try:
            self.agreement.check_pending()
        except Mismatch:
            return False
        return True

    def check_pending(self) -> None:
        """On a GPU: raise a mismatch that was found too late, see :class:`Agreement`."""
        try:
            self.agreement.check_pending()
        except Mismatch as error:
            if self.manager.current.is_on_gpu and is_capturing():
                # (A step without a graph then finds out what differs.)
                what = str(error) or "the ranks reduce different parameters"
                message = f"{what}. Run one step without a graph before"
                capture.refuse(self.manager.current, self.where(), message)
            self.raise_mismatch(error, None)

    def raise_mismatch(
        self,
        error: Mismatch,
        reduction: Reduction | None,
        requested: Sequence[tuple[str, Parameter]] | None = None,
    ) -> NoReturn:
        """Ranks do not reduce the same: wait for all collectives in flight, and raise the error.

        ``reduction`` is this rank's, if it is not over; ``requested`` are the parameters of a
        reduction on request.
        """
        self.agreement.pending.clear()  # what follows on it means nothing
        where = error.where or self.where()
        if requested is None and error.is_request:
            requested = self.parameters.params
        if isinstance(error, SkippedMismatch):  # collectives in flight may never end
            skipped = self.statistics.skipped if reduction is None else reduction.skipped
            buckets = self.manager.current.buckets
            here = [bucket.title for bucket in buckets if bucket.index in skipped]
            raise RuntimeError(
                f"{where}, bucket 0: skip_all_reduce_unused_params=True needs the same "
                "parameters to be unused on all ranks, but the ranks leave out different buckets. "
                f"This rank leaves out: {', '.join(here) or 'none'}. The process group cannot be "
                "used any more: restart with skip_all_reduce_unused_params=False"
            ) from None
        if isinstance(error, Displaced):  # likewise
            raise RuntimeError(
                f"{where}, {self.manager.current.buckets[0].title}: {error}. Another "
                "collective of the program has run in the place of this bucket: its order among "
                "the buckets is not the same on all ranks. That is so where layers make "
                "collectives in the backward, and some ranks leave a parameter unused. Give your "
                "collectives a process group of their own (torch.distributed.new_group), or pass "
                "find_unused_parameters=True, as with stock DDP, and restart"
            ) from None
        if reduction is not None:
            reduction.abort(str(error) or "the ranks reduce different parameters")
        if isinstance(error, Disagreement):
            raise RuntimeError(f"{where}, bucket 0: {error}") from None
        if self.memory is not None:  # all ranks come here, and wait for each other in verify()
            self.memory.end()
        site = self.forwards.call_site
        for each in (self.forwards.call_sites or {}).values():
            if each.hash == error.call_site:
                site = each
        self.parameters.verify(where, requested, "" if site is None else site.name)
