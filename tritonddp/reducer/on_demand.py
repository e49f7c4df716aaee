"""Reductions that the user asks for: ``reduce_gradients()``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.parameters import schema_of
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.agreement import GradSource, Mismatch, Weight
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.kernels.dispatch import gradient_dtype
from tritonddp.reducer.reductions import Reductions


def reduce_given(
    reductions: Reductions,
    gradients: Sequence[Tensor | None] | Mapping[str, Tensor | None],
    params: Iterable[Tensor] | None,
    named: Sequence[tuple[str, Tensor]],
    prepare: Callable[[], None],
) -> tuple[Tensor | None, ...] | dict[str, Tensor | None]:
    """The means of gradients; see ``DistributedDataParallel.reduce_gradients()``.

    ``named`` are all parameters of the module that require gradients. ``prepare`` ends what was
    before, with collectives.
    """
    if not isinstance(gradients, Mapping | Sequence) or isinstance(gradients, str | bytes):
        raise TypeError(
            "gradients should be a tuple or a list of tensors, or tensors by name, got "
            f"{gradients!r}"
        )
    if params is not None:  # ranks with different sizes would crash in the collective
        named = _named(params, named)
        options = {"gradients": "of reduce_gradients()"}
        device = reductions.manager.current.params[0].device
        where = f"{reductions.where()}, reduce_gradients()"
        verify_same(describe(named, [], options), reductions.group, device, where)
    if isinstance(gradients, Mapping):
        unknown = sorted(map(str, set(gradients) - {name for name, _ in named}))
        if unknown:
            raise ValueError(
                f"gradients for {', '.join(unknown[:10])}, which are not trainable "
                "parameters of the module"
            )
        means = _means(reductions, named, [gradients.get(name) for name, _ in named], prepare)
        return {name: mean for (name, _), mean in zip(named, means, strict=True)}
    return tuple(_means(reductions, named, list(gradients), prepare))


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
    reductions: Reductions,
    named: Sequence[tuple[str, Tensor]],
    gradients: Sequence[Tensor | None],
    prepare: Callable[[], None],
) -> list[Tensor | None]:
    """The means of ``gradients``, which belong to ``named``: the same on all ranks."""
    if len(gradients) != len(named):
        raise ValueError(f"{len(gradients)} gradients came for {len(named)} parameters")
    for (name, param), gradient in zip(named, gradients, strict=True):
        if gradient is not None:
            _check_gradient(name, param, gradient, param in reductions.parameters.sparse)
    prepare()
    weight = reductions.sync.weight
    # Stand-ins for the parameters, whose own .grad must stay as it is.
    stand_ins: list[tuple[str, Any]] = []
    sparse: dict[Tensor, str] = {}
    for (name, param), gradient in zip(named, gradients, strict=True):
        stand_in = detached(param).requires_grad_(param.requires_grad)
        stand_ins.append((name, stand_in))
        if param in reductions.parameters.sparse:
            sparse[stand_in] = f"sparse {name}"
        if gradient is not None:
            grad = gradient.detach()
            if weight is not None and weight.is_sum:
                grad = grad / weight.scale
            # A gradient that is cast is written to.
            is_cast = reductions.manager.factory.wire.casts(param) and stand_in not in sparse
            stand_in.grad = grad.clone() if is_cast else grad
    reduction = _open(
        reductions,
        reductions.temporary(stand_ins, views=True, sparse=sparse),
        weight=weight,
        schema=schema_of(stand_ins, *sparse.values()),
        of_backwards=False,
    )
    _reduce_now(reductions, reduction, stand_ins)
    for call in reductions.events.on_end:
        call(reduction)
    return [stand_in.grad for _, stand_in in stand_ins]


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


def reduce_accumulated(reductions: Reductions, accumulated: Sequence[bool]) -> Reduction:
    """Average ``.grad`` of all trainable parameters: the end of gradient accumulation.

    Args:
        reductions: of the wrapper.
        accumulated: for each parameter in a bucket, whether a backward that was not reduced has
            used it.

    Returns:
        The reduction.
    """
    current = reductions.manager.current
    # Parameters that were frozen since the last reduction without being used: they are still in a
    # bucket, but their gradients are not part of this reduction.
    stale = {
        param
        for param, used in zip(current.params, accumulated, strict=True)
        if not used and not param.requires_grad
    }
    named_params = list(zip(current.names, current.params, strict=True))
    reduction = _open(reductions, reductions.temporary(named_params), stale)
    for call in reductions.events.on_request:
        call(reduction)
    _reduce_now(reductions, reduction, named_params)
    return reduction


def _open(
    reductions: Reductions,
    bucket_set: BucketSet,
    stale: Collection[Tensor] = (),
    weight: Weight | None = None,
    schema: bytes | None = None,
    of_backwards: bool = True,
) -> Reduction:
    return reductions.open(
        bucket_set,
        [param.grad is not None and param not in stale for param in bucket_set.params],
        GradSource.REQUEST,
        f"{reductions.where()}, reduce_gradients()",
        weight,
        schema,
        of_backwards,
    )


def _reduce_now(
    reductions: Reductions, reduction: Reduction, named_params: Sequence[tuple[str, Parameter]]
) -> None:
    try:
        with Uninterrupted():
            reduction.reduce_now()
    except Mismatch as error:
        for call in reductions.events.on_abort:
            call(reduction)
        reductions.raise_mismatch(error, None, named_params)
