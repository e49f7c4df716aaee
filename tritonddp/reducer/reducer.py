"""Reduce the gradients of one wrapper on all ranks, with or without a backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import is_capturing
from tritonddp._torch import preserve_version_counters
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.manager import BucketManager
from tritonddp.buckets.parameters import ModuleParameters, schema_of
from tritonddp.comm.broadcast import StateBroadcast, bytes_of
from tritonddp.comm.reduction import LocalError, Reduction, open_reduction
from tritonddp.comm.weights import NOTHING, Weights
from tritonddp.coordination.agreement import (
    SOURCE,
    Agreement,
    Disagreement,
    GradSource,
    Mismatch,
    Unmatched,
)
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.kernels.dispatch import gradient_dtype
from tritonddp.reducer import capture
from tritonddp.reducer.deferred import Deferred
from tritonddp.reducer.extension import Events
from tritonddp.reducer.graph.backward import Forwards, SyncState

logger = logging.getLogger(__name__)


class Reducer:
    """Average gradients over the ranks of one wrapper, and apply what follows a reduction.

    This class does not depend on autograd. After a reduction it rebuilds buckets, adds and removes
    parameters, completes the collectives of a backward that failed on this rank, and raises errors
    if the ranks do not reduce the same gradients.

    Args:
        parameters: parameters of the module; identical on all ranks.
        group: the ranks to average over.
        manager: holds the buckets.
        agreement: writes and compares the headers of the ranks.
        weights: header field that holds the weights of the ranks.
        counters: count launches and bytes sent.
        sync: settings of the next backward, written by the wrapper.
        broadcast: overwrites added parameters with the values of one rank; ``None`` if each
            rank keeps its local values.

    Attributes:
        parameters, group, manager, agreement, weights, counters, sync: see above.
        events: callbacks of extensions.
        forwards: decides which backwards are reduced.
        deferred: actions and errors for the next forward of this rank.
        afterwards: see :meth:`call_afterwards`.
        own_gradients_at: reduction count at which ``.grad`` last held unreduced gradients of
            this rank.
        stepped_at: reduction count at the last optimizer step of the parameters' owners.
    """

    def __init__(
        self,
        parameters: ModuleParameters,
        group: Group,
        manager: BucketManager,
        agreement: Agreement,
        weights: Weights,
        counters: Counters,
        sync: SyncState,
        broadcast: StateBroadcast | None = None,
    ) -> None:
        self.parameters, self.group, self.manager = parameters, group, manager
        self.agreement, self.weights = agreement, weights
        self.counters, self.sync = counters, sync
        self.where = manager.where
        self.events = Events()
        self.forwards = Forwards()
        self.deferred = Deferred()
        self._broadcast = broadcast
        self.afterwards: Callable[[], None] | None = None
        self.own_gradients_at, self.stepped_at = 0, -1
        self._has_warned = False  # has logged that compression does not apply to requests

    def call_afterwards(self, function: Callable[[], None]) -> None:
        """Call ``function`` on all ranks after each reduced backward, including abandoned ones."""
        self.afterwards = function

    # After a reduction

    def complete(self, reduction: Reduction, ready: Sequence[int] = ()) -> None:
        """Rebuild buckets if the order of gradients has changed, or parameters were frozen.

        Every rank of the reduction calls this method, so its collectives match. On a GPU, if the
        ranks did not reduce the same gradients, nothing is rebuilt: all ranks find the mismatch at
        the end of the next reduction, which uses the current buckets.

        Args:
            reduction: the reduction that has ended.
            ready: in a first backward, indices of the parameters in the order of their gradients.
        """
        if not self.check_alike():
            return
        manager = self.manager
        missing: Collection[int] | None = None
        if manager.is_provisional:
            missing = manager.agree_on_order(ready, self.sync.source_rank)
            if reduction.source.is_empty:  # this rank ran no backward that could show them
                missing = ()
        manager.current.use.settle(missing)
        manager.rebuild_buckets(
            each for each in reduction.buckets if each.index not in reduction.skipped
        )

    # Added and removed parameters

    @torch.no_grad()
    def adopt_parameters(
        self,
        in_backward: bool = False,
        requested: Sequence[tuple[str, Parameter]] | None = None,
    ) -> None:
        """Build new buckets on all ranks after parameters were added or removed.

        The ranks first compare headers, in a bucket without gradients. If the parameters of another
        rank did not change, that rank has opened a reduction instead, and receives this header in
        its first bucket: then all ranks raise. Added parameters get the values of one rank.

        Args:
            in_backward: added parameters were already used with the local values of this rank.
            requested: parameters of the reduction on request that follows; ``None`` for any other
                caller.

        Raises:
            RuntimeError: the ranks did not change the same parameters. On a GPU all ranks raise
                it at the end of the next reduction, which uses the current buckets.
        """
        parameters, manager = self.parameters, self.manager
        self.group.recover()
        message = (
            "parameters were added or unfrozen, and the ranks must agree on them. Run one eager "
            "step before the capture"
        )
        capture.refuse(manager.current, self.where(), message)
        parameters.register()
        manager.announce()
        # A backward is counted when it begins. A request is not counted.
        step = f"step {self.counters.reductions + (not requested)}"
        with self.group.uninterrupted():
            if self.group.size > 1:
                current = manager.current if requested is None else manager.temporary(requested)
                asks = open_reduction(
                    self,
                    current,
                    GradSource.CHANGED,
                    [False] * len(current.params),
                    where=f"rank {self.group.rank}, {step}",
                    schema=parameters.schema_of_change(),
                )
                try:
                    asks.ask()
                except Mismatch as error:
                    self.counters.reductions += requested is None  # the other ranks count it
                    try:
                        asks.abandon()
                        asks.drain()
                    except Mismatch:
                        self.raise_mismatch(error, asks, requested)
                    return  # on a GPU
                if self._broadcast is not None and (new := parameters.new()):
                    self._send_values(new, in_backward, step)
            parameters.commit()
            manager.add_parameters()

    def _send_values(
        self, named: Sequence[tuple[str, Parameter]], are_used: bool, step: str
    ) -> None:
        params = [param for _, param in named]
        own = [param.detach().clone() for param in params] if are_used else []
        # Most values are already equal. Keep the versions, so that a retained graph stays usable.
        with preserve_version_counters(params):
            assert self._broadcast is not None
            self._broadcast.send(
                [param.detach() for param in params],
                step,
                f"parameters that were added ({listed([name for name, _ in named])})",
            )
        pairs = zip(named, own, strict=False)
        others = [name for (name, p), each in pairs if not torch.equal(bytes_of(each), bytes_of(p))]
        if others:
            logger.warning(
                "%s: %s were used before a forward of the module detected them, and their values "
                "differed between ranks. From now on, all ranks use the values of rank %s. The "
                "gradients of this step were computed with the local values. Initialize such "
                "parameters identically on all ranks, for example with the same seed",
                *(self.where(), listed(others), self.sync.source_rank),
            )

    def warn_of_nan(self, reduction: Reduction) -> None:
        """Warn that :meth:`abandon` follows. If interrupted, the abandon remains outstanding.

        Raises:
            RuntimeError: a CUDA graph is being captured; each replay would abandon buckets again.
        """
        capture.refuse(
            self.manager.current,
            self.where(),
            "the previous backward failed on this rank and still owes buckets to the other ranks. "
            "Run one eager step before the capture",
        )
        buckets = reduction.buckets
        unsent = {each.index for each in buckets[len(reduction.works) :]}
        unsent.difference_update(reduction.skipped)
        logger.warning(
            "%s: the previous backward failed%s",
            self.where(),
            # If all buckets were sent, a communication hook may have failed.
            f". It had not sent {len(unsent)} of {len(buckets)} buckets: their gradients are NaN "
            "in this step on ranks whose backward continued. Skip the optimizer step on all ranks"
            if unsent
            else "",
        )

    def abandon(self, reduction: Reduction) -> None:
        """Launch the remaining buckets of this reduction, whose backward failed on this rank.

        The other ranks launch all buckets of that step. This rank fills the buckets that it has not
        launched with NaN and launches them, so that later collectives match again.
        """
        if not reduction.works:
            self.manager.announce()
        reduction.abandon()

    @torch.no_grad()
    def drain(self, reduction: Reduction, ready: Sequence[int]) -> None:
        """Wait for the buckets after :meth:`abandon`, then call :meth:`complete`."""
        try:
            reduction.drain()
            self.complete(reduction, ready)
            if self.agreement.all_broke_off and not self.manager.current.is_on_gpu:
                self.forwards.arm_again()
        except Mismatch as error:
            self.raise_mismatch(error, reduction)
        if self.afterwards is not None:
            self.afterwards()

    # Without a backward

    def shadow_backward(self, source: GradSource) -> None:
        """Run the collectives of a reduced backward; ``source`` says why this rank runs none.

        This rank contributes zero gradients. Its ``.grad`` gets the mean, too.
        """
        capture.refuse(
            self.manager.current,
            self.where(),
            "this rank has no inputs, and a replay cannot run the reduction without inputs. Use "
            "join() without a graph",
        )
        self.check_pending()
        self.parameters.register()
        self.counters.reductions += 1
        self.manager.reduction_begins()
        self.manager.announce()
        current = self.manager.current
        used = [False] * len(current.params)
        shadow = open_reduction(self, current, source, used, values={self.weights: NOTHING})
        try:
            with self.group.uninterrupted(), torch.no_grad():
                shadow.reduce_now()
                self.complete(shadow)
        except Mismatch as error:
            self.raise_mismatch(error, shadow)
        finally:
            for bucket in self.manager.current.to_release:
                bucket.release()
        for call in self.events.on_end:
            call(shadow)

    # On request, between two backwards

    def gradients_are_own(self) -> None:
        """Record that ``.grad`` of this rank holds local gradients."""
        self.own_gradients_at = self.counters.reductions

    def owners_have_stepped(self) -> None:
        """Record that the owners of parameters have used all reduced gradients."""
        self.stepped_at = self.counters.reductions

    def reduce_given(
        self,
        gradients: Sequence[Tensor | None] | Mapping[str, Tensor | None],
        params: Iterable[Tensor] | None,
        named: Sequence[tuple[str, Tensor]],
        prepare: Callable[[], None],
    ) -> tuple[Tensor | None, ...] | dict[str, Tensor | None]:
        """Return the means of gradients; see ``DistributedDataParallel.reduce_gradients()``.

        ``named`` contains all trainable parameters of the module. ``prepare`` is called immediately
        before the first collective: a rank that raises earlier runs no collective.
        """
        if not isinstance(gradients, Mapping | Sequence) or isinstance(gradients, str | bytes):
            raise TypeError(
                "gradients should be a tuple or a list of tensors, or tensors by name, got "
                f"{gradients!r}"
            )
        if params is not None:  # ranks with different sizes would crash in the collective
            prepare()
            named = _named(params, named)
            described = describe(named, [], {"gradients": "of reduce_gradients()"})
            device = self.manager.current.params[0].device
            where = f"{self.where()}, reduce_gradients()"
            verify_same(described, self.group, device, where)
        if isinstance(gradients, Mapping):
            unknown = sorted(map(str, set(gradients) - {name for name, _ in named}))
            if unknown:
                raise ValueError(
                    f"reduce_gradients() got gradients for {', '.join(unknown[:10])}, which are "
                    "not trainable parameters of the module"
                )
            means = self._means(named, [gradients.get(name) for name, _ in named], prepare)
            return {name: mean for (name, _), mean in zip(named, means, strict=True)}
        return tuple(self._means(named, list(gradients), prepare))

    def _means(
        self,
        named: Sequence[tuple[str, Tensor]],
        gradients: Sequence[Tensor | None],
        prepare: Callable[[], None],
    ) -> list[Tensor | None]:
        """Return the means of ``gradients``, which belong to ``named``; identical on all ranks."""
        of_module, wire = self.parameters.sparse, self.manager.factory.wire
        if len(gradients) != len(named):
            raise ValueError(
                f"reduce_gradients() got {len(gradients)} gradients, but the module has "
                f"{len(named)} trainable parameters"
            )
        for (name, param), gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                _check_gradient(name, param, gradient, param in of_module)
        prepare()
        weight = self.sync.weight
        # Stand-ins for the parameters, whose .grad must not change.
        stand_ins: list[tuple[str, Any]] = []
        sparse: dict[Tensor, str] = {}
        for (name, param), gradient in zip(named, gradients, strict=True):
            stand_in = detached(param).requires_grad_(param.requires_grad)
            stand_ins.append((name, stand_in))
            if param in of_module:
                sparse[stand_in] = f"sparse {name}"
            if gradient is not None:
                grad = gradient.detach()
                if weight is not None and weight.is_sum:
                    grad = grad / weight.scale
                # A gradient that is cast gets overwritten.
                is_cast = wire.casts(param) and stand_in not in sparse
                stand_in.grad = grad.clone() if is_cast else grad
        reduction = self._open_request(
            self.manager.temporary(stand_ins, views=True, sparse=sparse),
            values={self.weights: weight},
            schema=schema_of(stand_ins, *sparse.values()),
            source=GradSource.GIVEN,
        )
        self._reduce_now(reduction, stand_ins)
        for call in self.events.on_end:
            call(reduction)
        return [stand_in.grad for _, stand_in in stand_ins]

    def reduce_accumulated(self) -> None:
        """Average ``.grad`` of all trainable parameters at the end of gradient accumulation."""
        manager = self.manager
        if not self.parameters.is_agreed:
            current = manager.current
            placed = list(zip(current.names, current.params, strict=True))
            self.adopt_parameters(requested=placed)
        current = manager.current
        # Parameters that were frozen since the last reduction and not used: they are still in a
        # bucket, but their gradients are not part of this reduction.
        pairs = zip(current.params, current.use.local, strict=True)
        stale = {param for param, used in pairs if not used and not param.requires_grad}
        named_params = list(zip(current.names, current.params, strict=True))
        reduction = self._open_request(manager.temporary(named_params), stale)
        try:
            for call in self.events.on_request:
                call(reduction)
        except LocalError:
            reduction.abandon()  # the other ranks do reduce
            reduction.drain()
            raise
        self._reduce_now(reduction, named_params)
        self.own_gradients_at = -1  # requests are not counted as reductions
        self.forwards.reduction_begins()
        manager.current.use.clear_local()
        for close in self.events.on_close:
            close(reduction)
        if self.afterwards is not None:
            self.afterwards()
        for end in self.events.on_end:
            end(reduction)

    def reduced_parameters(self) -> set[Tensor]:
        """Return the parameters whose ``.grad`` still is the last mean, identical on all ranks."""
        self.check_pending()
        if self.counters.reductions == self.own_gradients_at:
            return set()
        current, owners = self.manager.current, self.manager.factory.owners
        pairs = zip(current.params, current.use.local, strict=True)
        return {param for param, is_local in pairs if not is_local and param not in owners}

    def _open_request(
        self,
        bucket_set: BucketSet,
        stale: Collection[Tensor] = (),
        source: GradSource = GradSource.REQUEST,
        **details: Any,
    ) -> Reduction:
        if not self._has_warned and self.manager.factory.wire.compression is not None:
            self._has_warned = True
            logger.warning(
                "%s: reduce_gradients() sends gradients in full precision: compression applies to "
                "backwards only. (Shown once.)",
                self.where(),
            )
        used = [param.grad is not None and param not in stale for param in bucket_set.params]
        where = f"{self.where()}, reduce_gradients()"
        return open_reduction(self, bucket_set, source, used, where=where, **details)

    def _reduce_now(
        self, reduction: Reduction, named_params: Sequence[tuple[str, Parameter]]
    ) -> None:
        try:
            with self.group.uninterrupted():
                reduction.reduce_now()
        except Mismatch as error:
            for call in self.events.on_abort:
                call(reduction)
            self.raise_mismatch(error, None, named_params)

    # Ranks that reduce different gradients

    def check_alike(self) -> bool:
        """Return True if the ranks reduced the same gradients so far; identical on all ranks.

        On a GPU, a mismatch is raised later, at the end of the next reduction, so that all ranks
        raise it in the same reduction.
        """
        try:
            self.agreement.check_pending()
        except Mismatch:
            return False
        return True

    def check_pending(self) -> None:
        """Raise a mismatch that was found late, which happens on GPUs; see :class:`Agreement`."""
        try:
            self.agreement.check_pending()
        except Mismatch as error:
            if self.manager.current.is_on_gpu and is_capturing():
                # A step without a graph then finds the difference.
                what = str(error) or "the ranks reduce different parameters"
                message = f"{what}. Run one eager step before the capture"
                capture.refuse(self.manager.current, self.where(), message)
            self.raise_mismatch(error, None)

    def raise_mismatch(
        self,
        error: Mismatch,
        reduction: Reduction | None,
        requested: Sequence[tuple[str, Parameter]] | None = None,
    ) -> NoReturn:
        """Wait for all collectives in flight, then raise the error of a mismatch between ranks.

        ``reduction`` is the open reduction of this rank, if any; ``requested`` are the parameters
        of a reduction on request.
        """
        self.agreement.pending.clear()  # later headers are meaningless
        where, sent = error.where or self.where(), error.sent
        on_request = (GradSource.REQUEST, GradSource.GIVEN)
        if requested is None and sent is not None and sent.values[SOURCE] in on_request:
            requested = self.parameters.params
        if isinstance(error, Unmatched):  # collectives in flight may never end
            title = self.manager.current.buckets[0].title
            raise RuntimeError(f"{where}, {title}: {error}") from None
        if reduction is not None:
            reduction.wait_all(str(error) or "the ranks reduce different parameters")
        if isinstance(error, Disagreement):
            raise RuntimeError(f"{where}, bucket 0: {error}") from None
        if self.manager.memory is not None:  # all ranks get here, and wait in verify()
            self.manager.memory.end()
        self.parameters.verify(where, requested, error)


def _named(
    params: Iterable[Tensor], named: Sequence[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """Return the parameters that the user passed, with their names."""
    is_list = isinstance(params, Iterable) and not isinstance(params, Tensor)
    wanted: list[Any] = [*params] if is_list else [None]
    if not all(isinstance(p, Tensor) for p in wanted):
        raise TypeError(f"params should be an iterable of parameters, got {params!r}")
    names = {param: name for name, param in named}
    return [(names.get(p, f"parameter {i}"), p) for i, p in enumerate(wanted)]


def detached(param: Tensor) -> Tensor:
    """Return ``param.detach()`` with the gradient dtype of ``param``."""
    found = param.detach()
    found.grad_dtype = gradient_dtype(param)
    return found


def _check_gradient(name: str, param: Tensor, gradient: Any, may_be_sparse: bool) -> None:
    if not isinstance(gradient, Tensor):
        raise TypeError(f"the gradient of {name!r} should be a tensor, got {gradient!r}")
    layout = torch.sparse_coo if may_be_sparse and gradient.is_sparse else torch.strided
    wanted = (tuple(param.shape), gradient_dtype(param), param.device, layout)
    found = (tuple(gradient.shape), gradient.dtype, gradient.device, gradient.layout)
    if wanted != found:
        raise ValueError(
            f"the gradient of {name!r} should match its parameter, {' '.join(map(str, wanted))}, "
            f"but is {' '.join(map(str, found))}"
        )
