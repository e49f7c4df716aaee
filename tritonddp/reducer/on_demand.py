"""What happens when the user asks for it: ``reduce_gradients()`` and ``finalize_backward()``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.parameters import schema_of
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.agreement import GradSource, Mismatch
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.reducer import capture, recovery

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer


def reduce_given(
    reducer: Reducer,
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
        named = _named(params, named)
        options = {"gradients": "of reduce_gradients()"}
        device = reducer.manager.current.params[0].device
        where = f"{reducer.where()}, reduce_gradients()"
        verify_same(describe(named, [], options), reducer.group, device, where)
    if isinstance(gradients, Mapping):
        unknown = sorted(map(str, set(gradients) - {name for name, _ in named}))
        if unknown:
            raise ValueError(
                f"gradients for {', '.join(unknown[:10])}, which are not trainable "
                "parameters of the module"
            )
        means = _means(reducer, named, [gradients.get(name) for name, _ in named])
        return {name: mean for (name, _), mean in zip(named, means, strict=True)}
    return tuple(_means(reducer, named, list(gradients)))


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


def _means(
    reducer: Reducer, named: Sequence[tuple[str, Tensor]], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The means of ``gradients``, which belong to ``named``: the same on all ranks."""
    if len(gradients) != len(named):
        raise ValueError(f"{len(gradients)} gradients came for {len(named)} parameters")
    for (name, param), gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            _check_gradient(name, param, gradient, param in reducer.parameters.sparse)
    _prepare(reducer)
    weight = reducer.sync.weight
    # Stand-ins for the parameters, whose own .grad must stay as it is.
    stand_ins: list[tuple[str, Any]] = []
    sparse: dict[Tensor, str] = {}
    for (name, param), gradient in zip(named, gradients, strict=True):
        stand_in = param.detach().requires_grad_(param.requires_grad)
        stand_ins.append((name, stand_in))
        if param in reducer.parameters.sparse:
            sparse[stand_in] = f"sparse {name}"
        if gradient is not None:
            grad = gradient.detach()
            if weight is not None and weight.is_sum:
                grad = grad / weight.scale
            # A gradient that is cast is written to.
            is_cast = reducer.wire.casts(param) and stand_in not in sparse
            stand_in.grad = grad.clone() if is_cast else grad
    run = _run(reducer, reducer.manager.temporary(stand_ins, views=True, sparse=sparse))
    run.schema, run.weight = schema_of(stand_ins, *sparse.values()), weight
    run.of_backwards = False
    _reduce_now(reducer, run, stand_ins)
    for call in reducer.events.on_end:
        call(run)
    return [stand_in.grad for _, stand_in in stand_ins]


def _check_gradient(name: str, param: Tensor, gradient: Any, may_be_sparse: bool) -> None:
    if not isinstance(gradient, Tensor):
        raise TypeError(f"the gradient of {name!r} should be a tensor, got {gradient!r}")
    layout = torch.sparse_coo if may_be_sparse and gradient.is_sparse else torch.strided
    wanted = (tuple(param.shape), param.dtype, param.device, layout)
    found = (tuple(gradient.shape), gradient.dtype, gradient.device, gradient.layout)
    if wanted != found:
        raise ValueError(
            f"the gradient of {name!r} should be {' '.join(map(str, wanted))} like its parameter, "
            f"but is {' '.join(map(str, found))}"
        )


def reduce_accumulated(reducer: Reducer) -> None:
    """Average ``.grad`` of all trainable parameters: the end of gradient accumulation."""
    _prepare(reducer)
    parameters, current = reducer.parameters, reducer.manager.current
    parameters.register()
    reducer.refresh_parameters()
    # Parameters that were frozen since the last reduction without being used: they are still in a
    # bucket, but their gradients are not part of this reduction.
    stale = {
        param
        for param, used in zip(current.params, reducer.accumulated, strict=True)
        if not used and not param.requires_grad
    }
    # First the parameters in buckets, which are the same on all ranks: the headers show whether
    # the parameters added since are the same, too.
    placed = list(zip(current.names, current.params, strict=True))
    last: ReductionRun | None = None
    for named_params in filter(None, (placed, parameters.added)):
        run = _run(reducer, reducer.manager.temporary(named_params), stale)
        if last is None:
            for call in reducer.events.on_begin:
                call(run)
        else:
            run.weight = last.weight
        last = run
        _reduce_now(reducer, run, named_params)
    assert last is not None
    reducer.forwards.reduction_begins()
    reducer.forget_accumulated()
    for call in (*reducer.events.on_close, *reducer.events.on_end):
        call(last)


def _run(reducer: Reducer, bucket_set: BucketSet, stale: Collection[Tensor] = ()) -> ReductionRun:
    run = ReductionRun(
        *(bucket_set, reducer.plain, reducer.agreement, reducer.events),
        [param.grad is not None and param not in stale for param in bucket_set.params],
        GradSource.REQUEST,
    )
    run.where = f"{reducer.where()}, reduce_gradients()"
    return run


def _reduce_now(
    reducer: Reducer, run: ReductionRun, named_params: Sequence[tuple[str, Parameter]]
) -> None:
    reducer.announce(run)
    try:
        with Uninterrupted():
            run.reduce_now()
    except Mismatch as error:
        for call in reducer.events.on_abort:
            call(run)
        recovery.raise_mismatch(reducer, error, None, named_params)


def prepare_to_compare(reducer: Reducer) -> set[Tensor]:
    """Parameters whose ``.grad`` is still the result of the last reduction, as on all ranks."""
    _prepare(reducer, "compared")
    reducer.wait_post_backward()
    if reducer.is_detached or reducer.counters.reductions == reducer.own_gradients_at:
        return set()
    pairs = zip(reducer.manager.current.params, reducer.accumulated, strict=True)
    return {param for param, is_accumulated in pairs if not is_accumulated}


def _prepare(reducer: Reducer, what: str = "reduced on request") -> None:
    if reducer.backward_runs:
        raise RuntimeError(
            f"{reducer.where()}: gradients cannot be {what} while a backward runs: wait for its end"
        )
    capture.refuse(reducer, f"gradients are not {what} in a replay: do it without a graph")
    check_finalized(reducer)
    recovery.recover(reducer.group)
    reducer.check_pending()


# Backwards that end where the user says (in stock DDP from torch 2.15)


def check_finalized(reducer: Reducer) -> None:
    """Raise a RuntimeError if a backward waits for :func:`finalize_backward`."""
    if reducer.run is not None and reducer.run.awaits_finalize:
        raise RuntimeError(
            f"{reducer.where()}: Expected to have finalized the prior backward pass before "
            "starting a new one. Call finalize_backward() after backward() when "
            "require_manual_backward_finalization is true."
        )


def finalize_manually(reducer: Reducer, required: bool) -> None:
    """Whether backwards end in :func:`finalize_backward`, not by themselves."""
    # (A backward that failed is over: the next forward makes up for it.)
    if reducer.backward_runs or (reducer.run is not None and reducer.run.awaits_finalize):
        raise RuntimeError(
            f"{reducer.where()}: set_manual_finalization_required cannot be called after forward "
            "while a backward pass is expected or in progress. Set "
            "require_manual_backward_finalization before forward or after backward finalization"
        )
    reducer.finalizes_manually = required


@torch.no_grad()
def finalize_backward(reducer: Reducer) -> None:
    """Wait for the buckets of a backward that is over, or has launched all of them."""
    if not reducer.finalizes_manually:
        raise RuntimeError(
            "finalize_backward() called but manual backward finalization is not required. Set "
            "require_manual_backward_finalization to true first."
        )
    run = reducer.run
    if run is not None and run.awaits_finalize:
        run.awaits_finalize = False  # if it fails, the next forward makes up for it
        reducer.finish(run)
        return
    if run is not None and reducer.backward_runs and not run.is_local:
        if len(run.works) < len(run.buckets):
            raise RuntimeError(
                f"{reducer.where()}: finalize_backward() called before all DDP buckets were "
                f"ready. next_bucket_={len(run.works)}. Call finalize_backward() only after "
                "all DDP-managed parameters have computed gradients."
            )
        if any(run.works):
            try:
                run.finish()  # the end of the backward does the rest
            except Mismatch as error:
                recovery.raise_mismatch(reducer, error, run)
            return
    raise RuntimeError(
        f"{reducer.where()}: finalize_backward() called but no gradient reduction requires "
        "finalization. This can happen if no_sync() is active or finalize_backward() was "
        "already called for this backward pass."
    )
