"""Norms of gradients and clipping, by torch's foreach functions, over all owners of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tritonddp._torch import foreach_mul_, foreach_norm
from tritonddp.buckets.parameters import parameters_of
from tritonddp.reducer.reducer import Reducer


class GradientNorms:
    """Norms of the gradients of a wrapper's module, of which ``core`` is the reducer."""

    def __init__(self, core: Reducer) -> None:
        self._core = core

    @torch.no_grad()
    def norm(self, module: nn.Module, per_parameter: bool) -> Tensor | dict[str, Tensor]:
        """See :meth:`tritonddp.DistributedDataParallel.grad_norm`."""
        self._check_complete("grad_norm()")
        if not per_parameter:
            return self._total(module)
        if self._core.manager.factory.owners:
            raise RuntimeError(
                f"{self._core.where()}: grad_norm(per_parameter=True) with "
                "ZeroRedundancyOptimizer: each rank has the gradients that it owns alone. "
                "grad_norm() gives the norm of all"
            )
        named = [each for each in parameters_of(module) if each[1].grad is not None]
        grads: list[Any] = [param.grad for _, param in named]
        return {name: each for (name, _), each in zip(named, _norms_of(grads), strict=True)}

    @torch.no_grad()
    def clip(self, module: nn.Module, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """See :meth:`tritonddp.DistributedDataParallel.clip_grad_norm_`."""
        self._check_complete("clip_grad_norm_()")
        total = self._total(module)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"{self._core.where()}: the total norm of order 2 for gradients is non-finite, so "
                "it cannot be clipped. To disable this error and scale the gradients by the "
                "non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        # (Without a condition, for which the host would wait.)
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        grads: list[Any] = [p.grad for _, p in parameters_of(module) if p.grad is not None]
        for (device, _), numbers in _by_kind(grads).items():
            foreach_mul_([grads[number] for number in numbers], factor.to(device))
        return total

    def _total(self, module: nn.Module) -> Tensor:
        """The norm of all gradients, of those too that other ranks own."""
        core, owners = self._core, self._core.manager.factory.owners
        with_grad = [param for _, param in parameters_of(module) if param.grad is not None]
        total = _total_of([param.grad for param in with_grad])  # type: ignore[misc]
        if not owners:
            return total
        # A gradient without an owner is there on all ranks, and counts on one. Before the first
        # reduction has brought buckets with owners, all are.
        mine: list[Any] = [p.grad for p in with_grad if owners.get(p, 0) == core.group.rank]
        is_double = float(total.dtype is torch.float64)  # here, or on any rank
        square = _total_of(mine).double().square()
        sums = torch.stack([square, torch.full_like(square, is_double)])
        sums = sums.to(core.manager.current.params[0].device)
        core.group.recover()
        core.group.all_reduce(sums, core.where(), "sum of the squares of all owners' gradients")
        return sums[0].sqrt().to(torch.float64 if sums[1] else torch.float32)

    def _check_complete(self, what: str) -> None:
        """Raise a RuntimeError if the gradients are not complete now."""
        core = self._core
        core.check_finalized()
        if core.backward_runs:
            raise RuntimeError(f"{core.where()}: {what} while a backward runs: wait for its end")
        if core.steps_optimizers:
            raise RuntimeError(
                f"{core.where()}: {what} where optimizers step in the backward: each drops its "
                "gradients there, so that they never all exist. Use an optimizer that steps after "
                "it"
            )


def _by_kind(grads: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Numbers of the gradients, by device and dtype: foreach functions take those of one kind."""
    by_kind: dict[Any, list[int]] = {}
    for number, grad in enumerate(grads):
        by_kind.setdefault((grad.device, grad.dtype), []).append(number)
    return by_kind


def _norms_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each gradient, ``()`` fp32 or fp64, on its device; of sparse ones too."""
    norms: dict[int, Tensor] = {}
    for (_, dtype), numbers in _by_kind(grads).items():
        alike = [grads[number] for number in numbers]
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in alike]
        # (A norm in fp16 could be too large for it.)
        wide = torch.promote_types(dtype, torch.float32)
        norms |= zip(numbers, foreach_norm(values, 2, wide), strict=True)
    return [norms[number] for number in range(len(grads))]


def _total_of(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients, ``()`` fp32 or fp64, on the device of the first."""
    if not grads:
        return torch.zeros((), device="cpu")
    norms = _norms_of(grads)
    total = torch.stack([norm.to(norms[0].device) for norm in norms])
    return torch.linalg.vector_norm(total, dtype=torch.float64).to(total.dtype)
