"""Builds the buckets, and rebuilds them when the order of gradients or the parameters change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from types import NoneType
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._modes import outside_modes
from tritonddp.buckets.assignment import BucketCaps
from tritonddp.buckets.bucket import Bucket, GradientError
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.exchange import HostMemory, Transport
from tritonddp.buckets.formats import BucketFactory
from tritonddp.buckets.grad_storage.grad_storage import JointUnpack
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.buckets.residuals import Left, residuals_of
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.hosts import Hosts

logger = logging.getLogger(__name__)

# Ranks that used a parameter are counted in its gradient dtype; bf16 counts up to this number.
_COUNTS = 256


class BucketManager:
    """Holds the current buckets, and replaces them after all ranks have agreed.

    Added parameters get new buckets at the next forward. Frozen or removed parameters leave their
    buckets after the first reduction without them. If a frozen parameter is unfrozen later, the
    training loop alternates: from then on it stays in its bucket, and counts as unused while it is
    frozen.

    Attributes:
        is_provisional: the order of gradients is not known yet; the next reduced backward shows it.
        keeps_order: buckets stay in registration order, see :meth:`BucketCaps.registered`.
        schema: hash of the trainable parameters in the last reduction.
        to_remove: parameters that were frozen or removed from the module. They leave after a
            reduction in which no rank had a gradient for them: a program may call a removed layer
            outside the module, or use a tensor made from a parameter in its place.
        former_counts: :meth:`rank_counts` of the last reduction, if its buckets were replaced.
        ready_order: names in the order of the gradients in the first reduced backward.
    """

    def __init__(
        self,
        parameters: ModuleParameters,
        group: Group,
        caps: BucketCaps,
        factory: BucketFactory,
        counters: Counters,
        memory: HostMemory | None = None,
    ) -> None:
        self.factory = factory  # makes the buckets of backwards
        self.memory = memory  # finds hosts; None: use the process group only
        self._listener: Callable[[], Any] = NoneType
        self._captured: list[Bucket | JointUnpack] = []
        self._of_temporary = factory.transport  # for temporary buckets
        self._parameters = parameters
        self._group = group
        self._given_caps = caps
        self._cut_by(caps)
        self._counters = counters
        self.is_provisional = True
        self._order: list[int] | None = None  # parameter order for the next buckets
        self._is_restored = False  # the order was loaded from an earlier run
        self.schema = b""
        self.to_remove: set[Tensor] = set()
        self._removed: set[str] = set()
        self._frozen_in_turns: set[str] = set()
        self.has_moved = False  # the buckets have been replaced at least once
        self.ready_order: list[str] = []
        self.former_counts: list[tuple[list[Parameter], Tensor]] | None = None
        # Registration order is roughly forward order, so its reverse is a guess at ready order.
        self.current = self._build(parameters.trainable[::-1], factory, parameters.sparse)

    def temporary(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        views: bool = False,
        sparse: Collection[Tensor] | None = None,
    ) -> BucketSet:
        """Return buckets of these parameters for one reduction; the current ones remain.

        With ``views``, ``.grad`` is replaced by views of them. ``sparse`` are the parameters with
        sparse gradients, by default those of the module.
        """
        self.announce()
        factory = self.factory.temporary(self._of_temporary, views)
        return self._build(named_params, factory, self._sparse() if sparse is None else sparse)

    def where(self) -> str:
        """This rank and its step, for messages."""
        return f"rank {self._group.rank}, step {self._counters.reductions}"

    def notify(self, listener: WeakMethod[Callable[[], None]]) -> None:
        """Call ``listener``, if it still exists, when the buckets are replaced."""
        self._listener = listener

    def capture(self) -> None:
        """Prepare for the capture of a CUDA graph that reduces the current buckets.

        Graphs use the memory of these buckets as long as they live, so the buckets are kept.
        """
        current = self.current
        for bucket in current.buckets:
            bucket.capture()
            if bucket not in self._captured:
                self._captured.append(bucket)
        self._captured += [u for _, u in current.unpack_groups if u not in self._captured]

    def reduce_by(self, transport: Transport) -> None:
        """Reduce backwards with ``transport`` from now on, but not temporary buckets.

        Buckets no longer move into host memory.
        """
        if self.memory is not None:
            self.memory.leave()
            self.memory = None
        self.factory.reduce_by(transport)
        self.current.reduce_by(transport)
        if self.factory.hosts is not None:
            self._rebuild_for(None)

    def own(self, owners: Mapping[Tensor, int]) -> None:
        """Reduce the gradients of these parameters to one rank each, their owner, from now on.

        If the order is not known yet, this starts with the second reduction, since the first one
        rebuilds the buckets anyway. All ranks call this with the same arguments, between backwards.
        """
        self.factory.own(owners)
        if not self.is_provisional:
            current = self.current
            self._replace(list(zip(current.names, current.params, strict=True)))
            self.move()

    def announce(self) -> None:
        """Prepare a reduction of buckets that may still move: see :meth:`HostMemory.begin`."""
        if self.memory is not None and self.is_provisional:
            self.memory.begin(self.current)

    def move(self) -> None:
        """Adapt new buckets to the hosts: their wire formats, and on CPUs the shared memory.

        All ranks call this at the same time.
        """
        memory, factory = self.memory, self.factory
        if memory is None:
            return
        # If several hosts have several ranks each, buckets have other wire formats.
        hosts = memory.connect(self.where())
        if hosts is not factory.hosts and (factory.wire.reduce_dtype or factory.wire.compression):
            self._rebuild_for(hosts)
        memory.move(self.current, self._parameters.number, self.where())
        if memory.refusal is not None and factory.hosts is not None:
            self._rebuild_for(None)

    def _rebuild_for(self, hosts: Hosts | None) -> None:
        """Rebuild buckets in the wire formats between these hosts, or in those of one level."""
        self.factory.use_hosts(hosts)
        self._rebuild(list(zip(self.current.names, self.current.params, strict=True)))

    def _build(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        factory: BucketFactory,
        sparse: Collection[Tensor],
        former: BucketSet | None = None,
    ) -> BucketSet:
        is_temporary = factory is not self.factory
        caps = self._caps
        with outside_modes(param for _, param in named_params):
            built = BucketSet(named_params, caps, factory, former, sparse, is_temporary)
        if logger.isEnabledFor(logging.DEBUG):
            where = self.where()
            for bucket in built.buckets:
                params = bucket.params
                numel = sum(param.numel() for param in params)
                nbytes = numel * bucket.gradient_dtype.itemsize
                logger.debug(
                    f"{where}: bucket {bucket.index} of {len(built.buckets)}: {len(params)} "
                    f"parameters, {numel} elements, {nbytes} bytes, sent in "
                    f"{bucket.wire_dtype}, on {params[0].device}: {', '.join(bucket.names)}"
                )
        return built

    def _cut_by(self, caps: BucketCaps) -> None:
        self._caps, self.keeps_order = caps, caps.is_registered

    @property
    def order(self) -> list[str]:
        """Names of the parameters in the agreed order; empty before the ranks have agreed.

        Removed parameters are left out, since other parameters may have their names.
        """
        if self.is_provisional and not self._is_restored:
            return []
        held = self._parameters.held
        return list(compress(self.current.names, map(held.__contains__, self.current.params)))

    def reduction_begins(self) -> None:
        """Record the parameters of this reduction. Headers ensure equal changes on all ranks."""
        self._parameters.register()
        self.former_counts = None
        self.schema = self._parameters.schema
        held = self._parameters.held
        stay = held if self._parameters.keeps_frozen else {p for _, p in self._parameters.trainable}
        self.to_remove = {
            param
            for name, param in zip(self.current.names, self.current.params, strict=True)
            if param not in held or (param not in stay and name not in self._frozen_in_turns)
        }

    def rank_counts(self) -> list[tuple[list[Parameter], Tensor]]:
        """Return the parameters of the last reduction, each with the number of ranks using it."""
        if self.former_counts is not None:
            return self.former_counts
        return [(bucket.params, bucket.rank_counts()) for bucket in self.current.buckets]

    def agree_on_order(self, ready: Sequence[int], source_rank: int) -> list[int]:
        """Take the order of ``source_rank`` on all ranks, after the first reduced backward.

        If only some ranks used a parameter, all ranks keep the registration order instead.
        ``ready`` are indices of parameters in the order in which their gradients were ready on this
        rank. Return the indices of parameters without a gradient; these go last.
        """
        self.is_provisional = False
        ready = list(dict.fromkeys(ready))
        self.ready_order = [self.current.names[number] for number in ready]
        missing = sorted({*range(len(self.current.params))} - {*ready})
        if self._is_restored:  # the ranks have already agreed
            return missing
        if not self.keeps_order:
            counts = [count for _, each in self.rank_counts() for count in each.tolist()]
            all_ranks = min(max(counts), _COUNTS)  # inside join() some ranks have no inputs
            if any(0 < count < all_ranks for count in counts):
                self._cut_by(self._caps.registered())
        if self.keeps_order:
            self._order = self._registered_order()
            return missing
        self._order = [*ready, *missing]
        if not self._group.is_alone:
            order = torch.tensor(self._order, device=self.current.params[0].device)
            what = "broadcast of the order of gradients"
            self._group.broadcast(order, source_rank, self.where(), what)
            self._counters.collective(order.nbytes, self._group.size)
            self._order = order.tolist()
        return missing

    def _registered_order(self) -> list[int]:
        """Return indices of the parameters in the buckets, the last registered one first.

        Removed parameters go last.
        """
        number_of = {param: number for number, param in enumerate(self.current.params)}
        params = [param for _, param in self._parameters.params[::-1]]
        held = [number_of.pop(param) for param in params if param in number_of]
        return [*held, *number_of.values()]

    def rebuild_buckets(self, reduced: Iterable[Bucket]) -> None:
        """Rebuild after a reduction of these buckets, if the order changed or parameters leave."""
        looked_at = reduced if self.to_remove else ()
        counted = ((bucket.params, bucket.rank_counts().tolist()) for bucket in looked_at)
        used = {param for params, counts in counted for param in compress(params, counts)}
        stay, self.to_remove = self.to_remove & used, self.to_remove - used
        if self._order is not None or self.to_remove:
            self._rebuild_in_order()
        self.to_remove = stay
        self.move()

    def _rebuild_in_order(self) -> None:
        names, params = self.current.names, self.current.params
        order, self._order = self._order or range(len(params)), None
        kept = [(names[each], params[each]) for each in order if params[each] not in self.to_remove]
        if self._replace(kept):
            left = self.to_remove & self._parameters.held
            self._removed |= {n for n, p in zip(names, params, strict=True) if p in left}

    def add_parameters(self) -> None:
        """Build buckets that include the unplaced parameters, after all ranks have agreed."""
        added = self._parameters.unplaced
        self._frozen_in_turns |= self._removed.intersection(name for name, _ in added)
        self._replace([*self._parameters.bucketed(), *added])
        if not self.is_provisional:
            self.move()

    def restore(self, order: Sequence[int], keeps_order: bool) -> None:
        """Restore the buckets of an earlier run. All ranks call this together, between backwards.

        The next backward is observed like a first one, for gradients that the engine does not
        announce. It does not change the order.

        Args:
            order: indices of the module's parameters; trainable ones that are missing go last.
                Frozen ones were frozen and unfrozen repeatedly.
            keeps_order: value of the attribute in that run.
        """
        self.is_provisional, self._order, self._is_restored = True, None, True
        self.schema = self._parameters.schema
        self._cut_by(self._given_caps.registered() if keeps_order else self._given_caps)
        if self.keeps_order:
            order = sorted(order, reverse=True)
        named = [self._parameters.params[number] for number in order]
        self._frozen_in_turns = {name for name, param in named if not param.requires_grad}
        placed = {param for _, param in named}
        named += [each for each in self._parameters.trainable[::-1] if each[1] not in placed]
        self._replace(named)
        self.move()  # even if unchanged: in the earlier run these buckets had moved

    def _replace(self, named: Sequence[tuple[str, Parameter]]) -> bool:
        """Replace the current buckets by buckets of ``named``, if these differ."""
        if not named:
            return False
        self._check_dtypes({param for _, param in named})
        if self.current.fits(named, self._caps, self._sparse(), self.factory.owners):
            return False
        self._rebuild(named)
        return True

    def _sparse(self) -> set[Tensor]:
        """Return parameters with sparse gradients; removed parameters keep their kind."""
        held, buckets = self._parameters.held, self.current.buckets
        were = {param for each in buckets if each.storage.is_sparse for param in each.params}
        return self._parameters.sparse | (were - held)

    def _check_dtypes(self, kept: Collection[Tensor]) -> None:
        """Raise if a gradient dtype differs from its bucket, perhaps on this rank only.

        New buckets would not match the buckets of the other ranks.
        """
        for bucket in self.current.buckets:
            for slot, param in enumerate(bucket.params):
                if param in kept:
                    try:
                        bucket.check_dtype(slot)
                    except GradientError as error:
                        raise RuntimeError(f"{self.where()}: {error}") from None

    def _rebuild(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.former_counts = [(params, counts.clone()) for params, counts in self.rank_counts()]
        self.has_moved = True
        former = self.current.use
        with torch.no_grad():
            kept: dict[Tensor, list[Left]] = {}
            for _, param, left in residuals_of(self.current.buckets):
                kept.setdefault(param, []).append(left)
            self.factory.keep(kept)
            self.current = self._build(named, self.factory, self._sparse(), self.current)
            # The remaining residuals belong to gradients that are no longer quantized. They are
            # views, and would keep the residuals of whole buckets alive.
            self.factory.keep({})
        self.current.use.inherit(former)
        if (listener := self._listener()) is not None:
            listener()
