"""Which buckets there are, as the order of gradients becomes known and parameters change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.assignment import BucketCaps
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.parameters import Roster
from tritonddp.buckets.placement import Placement, assign
from tritonddp.buckets.residuals import Feedback
from tritonddp.coordination.collectives import broadcast
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import RollCall
from tritonddp.features.auto_compression.planner import Auto

logger = logging.getLogger("tritonddp.arrangement")

# Reductions after which parameters that are frozen leave their buckets. Until then they count as
# unused: many training loops freeze and unfreeze the same parameters in turns.
SETTLED = 8


class Arrangement:
    """The placement in force, and when another one takes its place: after a reduction only.

    Args:
        roster: the parameters of the module, alike on every rank.
        process_group: the ranks.
        caps: bucket sizes.
        bucket_class: of the buckets that backwards fill.
        counters: count what the buckets launch, and the agreement on their order.
        roll_call: names who is missing in that.
        feedback: carries over what quantisation has left out.
        auto: chooses how the gradients of each bucket travel, ``None`` if that is settled.
        check_finite: see :class:`Placement`.

    Attributes:
        placement: the buckets, and where in them each parameter is.
        has_moved: they are not those that there were at first.
        ready_order: names, in the order of the gradients in the first reduced backward.
    """

    def __init__(
        self,
        roster: Roster,
        process_group: dist.ProcessGroup,
        caps: BucketCaps,
        bucket_class: Callable[..., Bucket],
        counters: Counters,
        roll_call: RollCall,
        feedback: Feedback,
        auto: Auto | None = None,
        check_finite: bool = False,
    ) -> None:
        self._roster = roster
        self._group = process_group
        self._caps = caps
        self._bucket_class = bucket_class
        self._counters = counters
        self._roll_call = roll_call
        self._feedback = feedback
        self._auto = auto
        self._check_finite = check_finite
        # Numbers in the order of gradients in the first reduced backward, None when it is over.
        self._arrived: dict[int, None] | None = {}
        self._order: list[int] | None = None  # that the next placement shall have
        self._is_restored = False  # the order is that of an earlier run
        self._structure = roster.structure  # that the last reduction had
        self._since_change = 0  # reductions since it changed
        self.has_moved = False
        self.ready_order: list[str] = []
        # Of the last reduction, where its buckets are gone.
        self._flags: list[tuple[list[Parameter], Tensor]] | None = None
        # Registration order is roughly forward order, so its reverse is a guess at ready order.
        self.placement = self.place(roster.trainable[::-1], bucket_class)

    def place(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        bucket_class: Callable[..., Bucket] = Bucket,
        former: Placement | None = None,
        sparse: Collection[Tensor] | None = None,
    ) -> Placement:
        """Buckets of these parameters, beside those in force unless they take their place.

        ``sparse`` are those whose gradients are sparse, by default as the roster says.
        """
        placement = Placement(
            named_params,
            self._caps,
            bucket_class,
            self._group.rank(),
            self._group.size(),
            self._counters,
            former,
            self._roster.sparse if sparse is None else sparse,
            self._check_finite,
        )
        if logger.isEnabledFor(logging.DEBUG):
            self._log(placement.buckets)
        return placement

    def _log(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            logger.debug(
                "rank %d, step %d: bucket %d of %d: %d parameters, %d elements, %d bytes, travels "
                "in %s, on %s: %s",
                self._group.rank(),
                self._counters.reductions,
                bucket.index,
                len(buckets),
                len(bucket.params),
                sum(param.numel() for param in bucket.params),
                sum(param.nbytes for param in bucket.params),
                bucket.wire_dtype,
                bucket.params[0].device,
                ", ".join(bucket.names),
            )

    @property
    def is_provisional(self) -> bool:
        """Whether the order of gradients is still to be observed."""
        return self._arrived is not None

    @property
    def order(self) -> list[str]:
        """Names of the parameters as they were agreed on, empty where they have not been yet."""
        return list(self.placement.names) if self._arrived is None or self._is_restored else []

    @property
    def since_change(self) -> int:
        """Reductions since a parameter was frozen, unfrozen or added."""
        return self._since_change

    def arrived(self, number: int) -> None:
        """The gradient of a parameter came in the first reduced backward."""
        assert self._arrived is not None
        self._arrived.setdefault(number)

    def reduction_begins(self) -> None:
        """(The ballots see to it that what changes here changes on all ranks alike.)"""
        self._flags = None
        if self._roster.structure != self._structure:
            self._structure, self._since_change = self._roster.structure, 0

    def flags(self) -> list[tuple[list[Parameter], Tensor]]:
        """After a reduction: parameters, and on how many ranks it used each of them."""
        if self._flags is not None:
            return self._flags
        return [(bucket.params, bucket.flags) for bucket in self.placement.buckets]

    def agree_on_order(self, where: Callable[[], str], source_rank: int) -> list[int]:
        """At the end of the first reduced backward: all ranks take one rank's order of gradients.

        What never arrived there goes last. Returns what never arrived here.

        (A restored order is agreed on already.)
        """
        assert self._arrived is not None
        arrived, self._arrived = self._arrived, None
        self.ready_order = [self.placement.names[number] for number in arrived]
        missing = [n for n in range(len(self.placement.params)) if n not in arrived]
        if self._is_restored:
            return missing
        order = torch.tensor([*arrived, *missing], device=self.placement.params[0].device)
        with self._roll_call.naming(where(), "broadcast of the order of gradients"):
            broadcast(order, self._group, source_rank).wait()
        self._counters.collective(order.nbytes, self._group.size())
        self._order = order.tolist()
        return missing

    def renew(self) -> list[int | None] | None:
        """After a reduction: place anew if the order, or what is to be placed, has changed.

        Returns:
            For each parameter the number that it had before, ``None`` if it is new. ``None`` where
            all stays as it is.
        """
        self._since_change += 1
        is_settled = self._since_change == SETTLED
        if self._order is None and not self._roster.added and not is_settled:
            return None
        named = list(zip(self.placement.names, self.placement.params, strict=True))
        if self._order is not None:
            named = [named[number] for number in self._order]
            self._order = None
        held = {
            param for _, param in (self._roster.trainable if is_settled else self._roster.params)
        }
        kept = [(name, param) for name, param in named if param in held]
        kept += self._roster.added
        return self._place_instead(kept)

    def restore(self, order: Sequence[int], since_change: int) -> list[int | None] | None:
        """Place the parameters as an earlier run has. Alike on all ranks, between backwards.

        The next backward is observed like a first one: for gradients that the engine does not
        announce. The order in which they come counts for nothing.

        Args:
            order: numbers of the roster's parameters; trainable ones that are not there go last.
            since_change: as it was in that run.

        Returns:
            As :meth:`renew`.
        """
        self._arrived, self._order, self._is_restored = {}, None, True
        self._structure, self._since_change = self._roster.structure, since_change
        named = [self._roster.params[number] for number in order]
        placed = {param for _, param in named}
        named += [each for each in self._roster.trainable[::-1] if each[1] not in placed]
        return self._place_instead(named)

    def _place_instead(self, named: Sequence[tuple[str, Parameter]]) -> list[int | None] | None:
        """Place these instead of what is placed now; returns what :meth:`renew` does."""
        if not named:
            return None
        is_rewired = self._auto is not None and self._choose_wires(self._auto, named)
        if not is_rewired and self.placement.fits(named, self._caps, self._roster.sparse):
            return None
        self._flags = [(params, flags.clone()) for params, flags in self.flags()]
        self.has_moved = True
        number_of = {param: number for number, param in enumerate(self.placement.params)}
        with torch.no_grad():
            self._feedback.keep(self.placement.buckets)
            self.placement = self.place(named, self._bucket_class, self.placement)
            self._feedback.drop()
        return [number_of.get(param) for param in self.placement.params]

    def _choose_wires(self, auto: Auto, named_params: Sequence[tuple[str, Parameter]]) -> bool:
        """For the buckets that these parameters would have; whether the choice is another one."""
        sparse = self._roster.sparse
        assignment = assign(named_params, self._caps, sparse)
        return auto.choose([[named_params[n] for n in bucket] for bucket in assignment], sparse)
