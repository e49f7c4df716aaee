"""What users ask of a reducer between two steps: ``reduce_gradients()``, for example."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.parameters import schema_of
from tritonddp.comm.comm_hook import CommHook, Hook
from tritonddp.comm.reduction import LocalError, Reduction
from tritonddp.coordination.agreement import GradSource, Mismatch
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.kernels.dispatch import gradient_dtype
from tritonddp.reducer import capture, checkpoint
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.graph.backward import UNFINALIZED

logger = logging.getLogger(__name__)


class Requests:
    """What users ask of a wrapper's reducer, while no backward runs.

    Attributes:
        driver: that of the wrapper.
        own_gradients_at: number of reductions when ``.grad`` last became this rank's alone.
        stepped_at: number of reductions when the owners of parameters have stepped last.
    """

    def __init__(self, driver: AutogradDriver) -> None:
        self.driver, self._reducer = driver, driver.reducer
        self.own_gradients_at = 0
        self.stepped_at = -1
        self._has_warned = False  # that requests are not compressed

    def gradients_are_own(self) -> None:
        """``.grad`` of this rank is no mean."""
        self.own_gradients_at = self._reducer.counters.reductions

    def owners_have_stepped(self) -> None:
        """The owners of parameters have used all gradients that are reduced."""
        self.stepped_at = self._reducer.counters.reductions

    def _prepare(self, what: str = "reduced on request") -> None:
        """The user asks for something that needs the gradients of the last backward.

        Raises:
            RuntimeError: gradients cannot be ``what`` now.
        """
        current, where = self._reducer.manager.current, self._reducer.where()
        message = f"gradients are not {what} in a replay: do it without a graph"
        capture.refuse(current, where, message)
        problem = f"gradients cannot be {what} while a backward runs: wait for its end"
        self.driver.flush_outside_backward(problem, reduces=True)

    # Gradients

    def reduce_given(
        self,
        gradients: Sequence[Tensor | None] | Mapping[str, Tensor | None],
        params: Iterable[Tensor] | None,
        named: Sequence[tuple[str, Tensor]],
    ) -> tuple[Tensor | None, ...] | dict[str, Tensor | None]:
        """The means of gradients; see ``DistributedDataParallel.reduce_gradients()``.

        ``named`` are all parameters of the module that require gradients.
        """
        if not isinstance(gradients, Mapping | Sequence) or isinstance(gradients, str | bytes):
            raise TypeError(
                "gradients should be a tuple or a list of tensors, or tensors by name, got "
                f"{gradients!r}"
            )
        if params is not None:  # ranks with different sizes would crash in the collective
            self._prepare()
            named = _named(params, named)
            described = describe(named, [], {"gradients": "of reduce_gradients()"})
            device = self._reducer.manager.current.params[0].device
            where = f"{self._reducer.where()}, reduce_gradients()"
            verify_same(described, self._reducer.group, device, where)
        if isinstance(gradients, Mapping):
            unknown = sorted(map(str, set(gradients) - {name for name, _ in named}))
            if unknown:
                raise ValueError(
                    f"gradients for {', '.join(unknown[:10])}, which are not trainable "
                    "parameters of the module"
                )
            means = self._means(named, [gradients.get(name) for name, _ in named])
            return {name: mean for (name, _), mean in zip(named, means, strict=True)}
        return tuple(self._means(named, list(gradients)))

    def _means(
        self, named: Sequence[tuple[str, Tensor]], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The means of ``gradients``, which belong to ``named``: the same on all ranks."""
        reducer = self._reducer
        of_module, wire = reducer.parameters.sparse, reducer.manager.factory.wire
        if len(gradients) != len(named):
            raise ValueError(f"{len(gradients)} gradients came for {len(named)} parameters")
        for (name, param), gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                _check_gradient(name, param, gradient, param in of_module)
        self._prepare()
        weight = reducer.sync.weight
        # Stand-ins for the parameters, whose own .grad must stay as it is.
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
                # A gradient that is cast is written to.
                is_cast = wire.casts(param) and stand_in not in sparse
                stand_in.grad = grad.clone() if is_cast else grad
        reduction = self._open(
            reducer.manager.temporary(stand_ins, views=True, sparse=sparse),
            weight=weight,
            schema=schema_of(stand_ins, *sparse.values()),
            from_grad=False,
        )
        self._reduce_now(reduction, stand_ins)
        for call in reducer.events.on_end:
            call(reduction)
        return [stand_in.grad for _, stand_in in stand_ins]

    def reduce_accumulated(self) -> None:
        """Average ``.grad`` of all trainable parameters: the end of gradient accumulation."""
        self._prepare()
        driver, manager = self.driver, self._reducer.manager
        driver.parameters.register()
        driver.refresh_parameters()
        current = manager.current
        if not driver.parameters.is_agreed:
            placed = list(zip(current.names, current.params, strict=True))
            self._reducer.adopt_parameters(requested=placed)
            current = manager.current
        # Parameters that were frozen since the last reduction without being used: they are still
        # in a bucket, but their gradients are not part of this reduction.
        stale = {
            param
            for param, used in zip(current.params, current.use.local, strict=True)
            if not used and not param.requires_grad
        }
        named_params = list(zip(current.names, current.params, strict=True))
        reduction = self._open(manager.temporary(named_params), stale)
        try:
            for call in driver.events.on_request:
                call(reduction)
        except LocalError:
            reduction.take_part()  # the other ranks reduce
            raise
        self._reduce_now(reduction, named_params)
        self.own_gradients_at = -1  # requests are no reductions that are counted
        driver.forwards.reduction_begins()
        driver.use.clear_local()
        for close in driver.events.on_close:
            close(reduction)
        if self._reducer.afterwards is not None:
            self._reducer.afterwards()
        for end in driver.events.on_end:
            end(reduction)

    def _open(
        self, bucket_set: BucketSet, stale: Collection[Tensor] = (), **details: Any
    ) -> Reduction:
        if not self._has_warned and self._reducer.manager.factory.wire.compression is not None:
            self._has_warned = True
            logger.warning(
                "%s: reduce_gradients() sends gradients in full precision: compression applies to "
                "backwards only. (Shown once.)",
                self._reducer.where(),
            )
        used = [param.grad is not None and param not in stale for param in bucket_set.params]
        where = f"{self._reducer.where()}, reduce_gradients()"
        return self._reducer.open(bucket_set, GradSource.REQUEST, used, where=where, **details)

    def _reduce_now(
        self, reduction: Reduction, named_params: Sequence[tuple[str, Parameter]]
    ) -> None:
        try:
            with self._reducer.group.uninterrupted():
                reduction.reduce_now()
        except Mismatch as error:
            for call in self._reducer.events.on_abort:
                call(reduction)
            self._reducer.raise_mismatch(error, None, named_params)

    def reduced_parameters(self) -> set[Tensor]:
        """Parameters whose ``.grad`` is still the result of the last reduction, as on all ranks."""
        self._prepare("compared")
        driver, manager = self.driver, self._reducer.manager
        self._reducer.check_pending()
        driver.wait_post_backward()
        if driver.is_detached or driver.counters.reductions == self.own_gradients_at:
            return set()
        pairs = zip(manager.current.params, driver.use.local, strict=True)
        owners = manager.factory.owners
        return {param for param, accumulated in pairs if not accumulated and param not in owners}

    # The state of communication, and who communicates

    def comm_state(self) -> dict[str, Any]:
        """The state of communication; see :func:`checkpoint.comm_state`."""
        self.driver.flush()
        return checkpoint.comm_state(self._reducer)

    def load_comm_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from this state; see :func:`checkpoint.load_comm_state`."""
        self.driver.flush_outside_backward(
            "load_comm_state_dict() was called while a backward runs: call it between two steps"
        )
        if not self.driver.is_detached:
            checkpoint.load_comm_state(self._reducer, states)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have ``hook`` reduce the buckets of all backwards from now on.

        See :class:`~tritonddp.comm.comm_hook.CommHook`.

        Raises:
            RuntimeError: there is one already; or gradients are compressed, or have owners; or a
                backward runs.
        """
        driver, factory = self.driver, self._reducer.manager.factory
        driver.flush_outside_backward("a communication hook cannot be registered during a backward")
        if factory.owners:
            raise RuntimeError(
                "ZeroRedundancyOptimizer has gradients reduced to their owners, a communication "
                "hook to all ranks: leave one of them out"
            )
        if factory.wire.compression is not None:
            raise RuntimeError(
                "compression='int8' and a communication hook both decide how gradients are sent: "
                "leave one of them out"
            )
        if driver.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        driver.reduce_by(CommHook(hook, state, driver.group, driver.counters))

    # Backwards that end where the user says (in stock DDP from torch 2.15)

    @torch.no_grad()
    def finalize_requested(self) -> None:
        """Wait for the buckets of a backward that is over, or has launched all of them.

        Raises:
            RuntimeError: there is no such backward; or see
                :meth:`AutogradDriver.finalize_backward`.
        """
        driver = self.driver
        if not driver.finalizes_manually:
            raise RuntimeError(
                "finalize_backward() called but manual backward finalization is not required. Set "
                "require_manual_backward_finalization to true first."
            )
        backward = driver.backward
        if backward is not None and backward.phase is UNFINALIZED:
            driver.finalize_backward()
            return
        reduction = None if backward is None else backward.reduction
        if backward is not None and backward.runs and reduction is not None:
            if len(reduction.works) < len(reduction.buckets):
                raise RuntimeError(
                    f"{driver.where()}: finalize_backward() called before all DDP buckets were "
                    f"ready. next_bucket_={len(reduction.works)}. Call finalize_backward() only "
                    "after all DDP-managed parameters have computed gradients."
                )
            if any(reduction.works):
                try:
                    with self._reducer.group.uninterrupted():
                        reduction.finish()  # the end of the backward does the rest
                except Mismatch as error:
                    self._reducer.raise_mismatch(error, reduction)
                return
        raise RuntimeError(
            f"{driver.where()}: finalize_backward() called but no gradient reduction requires "
            "finalization. This can happen if no_sync() is active or finalize_backward() was "
            "already called for this backward pass."
        )


def _named(
    params: Iterable[Tensor], named: Sequence[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """The parameters that the user has given, with their names."""
    is_list = isinstance(params, Iterable) and not isinstance(params, Tensor)
    wanted: list[Any] = [*params] if is_list else [None]
    if not all(isinstance(p, Tensor) for p in wanted):
        raise TypeError(f"params should be parameters, one or more, got {params!r}")
    names = {param: name for name, param in named}
    return [(names.get(p, f"parameter {i}"), p) for i, p in enumerate(wanted)]


def detached(param: Tensor) -> Tensor:
    """``param.detach()``, with a ``.grad`` of the same dtype as that of ``param``."""
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
            f"the gradient of {name!r} should be {' '.join(map(str, wanted))} like its parameter, "
            f"but is {' '.join(map(str, found))}"
        )
