"""Which buckets there are, as the order of gradients becomes known and parameters change."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.assignment import BucketCaps
from tritonddp.buckets.bucket_set import BucketSet, assign
from tritonddp.buckets.formats import BucketFactory, WireFormat
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.buckets.residuals import residuals_of
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group

logger = logging.getLogger("tritonddp.arrangement")

# Reductions after which parameters that are frozen leave their buckets. Until then they count as
# unused: many training loops freeze and unfreeze the same parameters in turns.
REBUILD_AFTER = 8


class Planner(Protocol):
    """Who chooses how the gradients of each bucket travel: see :class:`AutoPlanner`."""

    report: str

    def choose(
        self, buckets: Sequence[Sequence[tuple[str, Tensor]]], sparse: Collection[Tensor]
    ) -> bool: ...

    def wire_of(self, index: int) -> WireFormat | None: ...

    @property
    def state(self) -> list[int]: ...

    def knows(self, state: Sequence[int]) -> bool: ...

    def load(self, state: Sequence[int]) -> None: ...


class BucketManager:
    """The buckets in force, and when others take their place: after a reduction only.

    Attributes:
        current: the buckets in force.
        factory: makes those that backwards fill.
        planner: chooses how the gradients of each bucket travel, ``None`` if that is settled.
        is_provisional: the order of gradients is still to be observed.
        schema: hash of what is trained that the last reduction had.
        former_counts: of the last reduction, where its buckets are gone: see :meth:`rank_counts`.
        since_change: reductions since a parameter was frozen, unfrozen or added.
        has_moved: the buckets are not those that there were at first.
        ready_order: names, in the order of the gradients in the first reduced backward.
    """

    def __init__(
        self,
        parameters: ModuleParameters,
        group: Group,
        caps: BucketCaps,
        factory: BucketFactory,
        counters: Counters,
    ) -> None:
        self.factory = factory
        self.planner: Planner | None = None
        self._parameters = parameters
        self._group = group
        self._caps = caps
        self._counters = counters
        self.is_provisional = True
        self._order: list[int] | None = None  # that the next buckets shall have
        self._is_restored = False  # the order is that of an earlier run
        self.schema = parameters.schema
        self.since_change = 0
        self.has_moved = False
        self.ready_order: list[str] = []
        self.former_counts: list[tuple[list[Parameter], Tensor]] | None = None
        # Registration order is roughly forward order, so its reverse is a guess at ready order.
        self.current = self._build(parameters.trainable[::-1], factory)

    def temporary(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        views: bool = False,
        sparse: Collection[Tensor] | None = None,
    ) -> BucketSet:
        """Buckets of these parameters for one reduction, beside those in force.

        With ``views``, ``.grad`` is replaced by views of them. Which of the parameters are
        ``sparse`` the module says by default.
        """
        return self._build(named_params, self.factory.temporary(views), sparse=sparse)

    def _build(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        factory: BucketFactory,
        former: BucketSet | None = None,
        sparse: Collection[Tensor] | None = None,
    ) -> BucketSet:
        sparse = self._parameters.sparse if sparse is None else sparse
        planner = self.planner if factory is self.factory else None
        wire_of = planner.wire_of if planner is not None else lambda index: None
        built = BucketSet(named_params, self._caps, factory, former, sparse, wire_of)
        if logger.isEnabledFor(logging.DEBUG):
            where = f"rank {self._group.rank}, step {self._counters.reductions}"
            for bucket in built.buckets:
                params = bucket.params
                numel, nbytes = sum(p.numel() for p in params), sum(p.nbytes for p in params)
                logger.debug(
                    f"{where}: bucket {bucket.index} of {len(built.buckets)}: {len(params)} "
                    f"parameters, {numel} elements, {nbytes} bytes, travels in "
                    f"{bucket.wire_dtype}, on {params[0].device}: {', '.join(bucket.names)}"
                )
        return built

    @property
    def order(self) -> list[str]:
        """Names of the parameters as they were agreed on, empty where they have not been yet."""
        is_agreed = not self.is_provisional or self._is_restored
        return list(self.current.names) if is_agreed else []

    def reduction_begins(self) -> None:
        """(The headers see to it that what changes here changes on all ranks alike.)"""
        self.former_counts = None
        if self._parameters.schema != self.schema:
            self.since_change = 0
        self.schema = self._parameters.schema

    def rank_counts(self) -> list[tuple[list[Parameter], Tensor]]:
        """After a reduction: parameters, and on how many ranks it used each of them."""
        if self.former_counts is not None:
            return self.former_counts
        return [(bucket.params, bucket.rank_counts()) for bucket in self.current.buckets]

    def agree_on_order(self, arrived: Sequence[int], where: str, source_rank: int) -> list[int]:
        """At the end of the first reduced backward: all ranks take the order of ``source_rank``.

        ``arrived`` are numbers of parameters in the order in which their gradients came here.
        Returns those of parameters whose gradients never came here; they go last.
        """
        self.is_provisional = False
        arrived = list(dict.fromkeys(arrived))
        self.ready_order = [self.current.names[number] for number in arrived]
        missing = sorted({*range(len(self.current.params))} - {*arrived})
        if self._is_restored:  # and agreed on already
            return missing
        order = torch.tensor([*arrived, *missing], device=self.current.params[0].device)
        self._group.broadcast(order, source_rank, where, "broadcast of the order of gradients")
        self._counters.collective(order.nbytes, self._group.size)
        self._order = order.tolist()
        return missing

    def renew(self) -> list[int | None] | None:
        """After a reduction: build anew if the order, or what is to be reduced, has changed.

        Returns:
            For each parameter the number that it had before, ``None`` if it is new. ``None`` where
            all stays as it is.
        """
        self.since_change += 1
        is_settled = self.since_change == REBUILD_AFTER
        if self._order is None and not self._parameters.added and not is_settled:
            return None
        parameters, names, params = self._parameters, self.current.names, self.current.params
        held = {param for _, param in (parameters.trainable if is_settled else parameters.params)}
        order = range(len(params)) if self._order is None else self._order
        self._order = None
        kept = [(names[number], params[number]) for number in order if params[number] in held]
        return self._replace([*kept, *parameters.added])

    def restore(self, order: Sequence[int], since_change: int) -> list[int | None] | None:
        """Have the parameters where an earlier run had them. Alike on all ranks, between backwards.

        The next backward is observed like a first one, for gradients that the engine does not
        announce, but their order counts for nothing.

        Args:
            order: numbers of the module's parameters; trainable ones that are not there go last.
            since_change: as it was in that run.
        """
        self.is_provisional, self._order, self._is_restored = True, None, True
        self.schema, self.since_change = self._parameters.schema, since_change
        named = [self._parameters.params[number] for number in order]
        placed = {param for _, param in named}
        named += [each for each in self._parameters.trainable[::-1] if each[1] not in placed]
        return self._replace(named)

    def _replace(self, named: Sequence[tuple[str, Parameter]]) -> list[int | None] | None:
        """Build buckets of these instead of those in force; returns what :meth:`renew` does."""
        if not named:
            return None
        sparse, is_rewired = self._parameters.sparse, False
        if self.planner is not None:
            assignment = assign(named, self._caps, sparse)
            planned = [[named[number] for number in bucket] for bucket in assignment]
            is_rewired = self.planner.choose(planned, sparse)
        if not is_rewired and self.current.fits(named, self._caps, sparse):
            return None
        self.former_counts = [(params, counts.clone()) for params, counts in self.rank_counts()]
        self.has_moved = True
        number_of = {param: number for number, param in enumerate(self.current.params)}
        with torch.no_grad():
            self.factory.kept = {p: left for _, p, left in residuals_of(self.current.buckets)}
            self.current = self._build(named, self.factory, former=self.current)
            # What is left is of gradients that are quantised no longer. It would keep the residuals
            # of whole buckets alive.
            self.factory.kept = {}
        return [number_of.get(param) for param in self.current.params]
