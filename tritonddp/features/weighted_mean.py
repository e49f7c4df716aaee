"""Gradients of batches of different sizes: ``ddp.weighted(n)`` on one rank, before the reduction.

A *window* is what a rank accumulates between two reductions: microbatches ``j`` of ``n_j`` items
each. The loss of a microbatch is a mean over its items and has the gradient ``g_j``. The window has
the weight ``W = sum_j n_j``, and ``.grad`` holds the mean ``m = sum_j n_j g_j / W``. The reduction
over ranks ``r`` is then ``sum_r W_r m_r / sum_r W_r``. One more microbatch changes the mean to

    m' = m + (n / (W + n)) (g - m)

(the incremental form of a weighted mean: D. H. D. West, "Updating mean and variance estimates",
Communications of the ACM 22(9), 1979). Because autograd adds to ``.grad``, ``m`` is kept elsewhere
while the backward runs. If losses are sums over their items, ``.grad`` holds the sum, and is
divided by ``W`` before the reduction.

A gradient that was in ``.grad`` before the window is already a mean, and is not part of ``g_j`` or
the sum. Gradients that unweighted backwards accumulated in the window are part of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from itertools import starmap
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.buckets.manager import BucketManager
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.reduction import Reduction
from tritonddp.comm.weights import Weight
from tritonddp.coordination.agreement import GradSource
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward, SyncState

logger = logging.getLogger(__name__)


def weight_of(n: Any, reduction: str) -> Weight:
    """Convert the arguments of ``weighted``. Raise the errors listed there."""
    if not isinstance(reduction, str) or reduction not in ("mean", "sum"):
        raise ValueError(f"reduction should be 'mean' or 'sum', got {reduction!r}")
    if isinstance(n, Tensor) and n.numel() == 1 and not (n.is_complex() or n.is_meta):
        n = n.item()
    if isinstance(n, bool) or not isinstance(n, Real):
        raise TypeError(
            f"the weight should be a number or a tensor with one element, got {n!r}: pass the "
            "number of items (samples, tokens) of this rank's loss"
        )
    try:
        items = float(n)
    except OverflowError:
        items = math.inf
    if not 0 <= items < math.inf:
        raise ValueError(f"the weight should be finite and nonnegative, got {n!r}")
    return Weight(items, reduction == "sum")


class AccumulationWindow(Extension):
    """The weighted backwards that a rank has accumulated since the last reduction.

    Installed by the first ``weighted()`` of a wrapper.
    """

    def __init__(
        self,
        parameters: ModuleParameters,
        sync: SyncState,
        manager: BucketManager,
    ) -> None:
        self._parameters, self._sync = parameters, sync
        self._manager = manager
        self.weight: Weight | None = None  # total of the window; None if the window is empty
        self._weight_before: Weight | None = None  # the weight before the running backward
        # By parameter: the gradient at the end of the last local backward, and its version.
        self._left: dict[Tensor, tuple[Tensor, int]] = {}
        # Gradients accumulated before the first backward, to which each backward adds.
        self._base: dict[Tensor, Tensor] = {}
        # During a backward: the mean so far of each parameter not merged yet, and the share of the
        # new gradients in the next mean.
        self._aside: dict[Tensor, Tensor | None] = {}
        self._share = 1.0
        self._has_warned = False

    def on_begin(self, backward: Backward) -> None:
        if self._sync.weight is not None or self.weight is not None:
            self._open(self._sync.weight, backward)
        if backward.reduction is not None:
            backward.reduction.tell(backward.reduction.weights, self.weight)

    def on_request(self, reduction: Reduction) -> None:
        weight: Weight | None = self._sync.weight
        self.clear_if_dropped()
        if weight is not None and self.weight is not None:
            raise RuntimeError(
                f"{reduction.where.removesuffix(', reduce_gradients()')}: the accumulated "
                "gradients already have the weights of their backwards: call reduce_gradients() "
                "outside weighted(n)"
            )
        self.weight = weight or self.weight
        reduction.tell(reduction.weights, self.weight)

    def on_pack(self, reduction: Reduction, bucket: Bucket, segment: Segment) -> None:
        is_accumulated = reduction.source is GradSource.REQUEST
        if is_accumulated or reduction.source.is_backward:
            first = reduction.bucket_set.numbers_of[bucket.index].start + segment.first
            if not is_accumulated:
                self.merge(segment.params)
            flags = reduction.bucket_set.use.flags
            self.divide(segment.params, flags[first : first + len(segment.params)])

    def on_compute_end(self, backward: Backward) -> None:
        """After a local backward: merge, and record the gradients."""
        if backward.reduction is not None:
            return
        params = self._manager.current.params
        self.merge(params)
        if self.weight is not None:
            grads = ((param, param.grad) for param in params)
            self._left = {p: (grad, grad._version) for p, grad in grads if grad is not None}

    def on_close(self, reduction: Reduction | None) -> None:
        if reduction is None:
            return
        weight, factor = self.weight, reduction.factor
        if weight is not None and not (weight.items or self._has_warned or factor is None):
            # On a GPU, the host would have to wait for the device.
            self._has_warned = factor.is_cpu and not factor.any()
            if self._has_warned:
                logger.warning(
                    "%s: all ranks gave this backward the weight 0, so its gradients are zero. An "
                    "optimizer would still apply momentum and weight decay: skip its step if no "
                    "rank has items. (Shown once.)",
                    reduction.where,
                )
        self.clear()

    def _open(self, weight: Weight | None, backward: Backward) -> None:
        """Begin a backward that has a weight or follows one; ``None`` outside ``weighted``."""
        self._weight_before = self.weight
        params: list[Any] = self._manager.current.params
        means = {param: param.grad for param in params}
        self.clear_if_dropped()
        if weight is None:
            if self.weight is not None:
                raise RuntimeError(
                    f"{backward.where}: this backward has no weight, but accumulated gradients of "
                    "weighted backwards are not reduced yet: run it inside weighted(n) too, or "
                    "discard them with zero_grad(set_to_none=True)"
                )
            return
        is_first = not any(self._manager.current.use.local)  # since the last reduction
        wants_base = is_first if weight.is_sum else backward.reduction is None
        is_late = backward.first_param is not None  # its first gradient is in .grad already
        if is_late and (wants_base if self.weight is None else not weight.is_sum):
            raise RuntimeError(
                f"{backward.where}: this weighted backward reached a parameter before any output "
                "of the wrapped module (for example, in a weight penalty). Its gradient is already "
                "in .grad and cannot be weighted. Add this loss term to an output in the module's "
                "forward, or reduce this backward separately"
            )
        if self.weight is None:
            self.weight = weight
            if wants_base:
                held = ((param, mean) for param, mean in means.items() if mean is not None)
                self._base = {param: mean.detach().clone() for param, mean in held}
            return
        if weight.is_sum != self.weight.is_sum:
            raise RuntimeError(
                f"{backward.where}: backwards weighted with reduction='mean' and reduction='sum' "
                "cannot be accumulated together: reduce one kind before running the other"
            )
        total = Weight(self.weight.items + weight.items, weight.is_sum)
        if not weight.is_sum:
            self._share = weight.items / total.items if total.items else 1.0
            self._aside = means
            for param in params:
                base = self._base.get(param)
                param.grad = None if base is None else base.clone()
        self.weight = total

    def merge(self, params: Iterable[Tensor]) -> None:
        """Make ``.grad`` the mean over the window; the gradients of ``params`` are ready.

        With ``reduction="sum"``, it remains the sum until :meth:`divide`.
        """
        if not self._aside:
            return
        with torch.no_grad():
            for param in params:
                if param in self._aside:
                    param.grad = _mean(self._aside.pop(param), param.grad, self._share)

    def divide(self, params: Iterable[Tensor], used: Iterable[bool]) -> None:
        """Before the reduction, turn a sum in ``.grad`` into the mean.

        Not in place, because tensors that the backward still uses may be views of ``.grad``.
        """
        if self.weight is None or not self.weight.is_sum:
            return
        scale = self.weight.scale
        share = self.weight.items / scale  # factor of the gradients before the window: 1 or 0
        with torch.no_grad():
            for param, is_used in zip(params, used, strict=True):
                if is_used and param.grad is not None:
                    base = self._base.get(param)
                    if base is None:
                        param.grad = param.grad / scale
                    else:
                        param.grad = ((param.grad - base) / scale).add_(base, alpha=share)

    def on_abort(self, reduction: Reduction | None) -> None:
        """Restore ``.grad`` and the weight from before a failed backward."""
        for param, mean in self._aside.items():
            param.grad = mean
        self._aside = {}
        self.weight = self._weight_before
        if self.weight is None:
            self._base = {}

    def clear_if_dropped(self) -> None:
        """Drop the weight if ``zero_grad`` has dropped all accumulated gradients.

        ``zero_grad`` does not reach parameters that left the module, so they are not checked.
        """
        held = (param for _, param in self._parameters.params)
        left = [(param, *self._left[param]) for param in held if param in self._left]
        if left and all(starmap(_is_dropped, left)):
            self.clear()

    def clear(self) -> None:
        """Start a new window after the window was reduced or dropped."""
        self.weight = self._weight_before = None
        self._left, self._base, self._aside = {}, {}, {}


def _is_dropped(param: Tensor, left: Tensor, version: int) -> bool:
    """Return True if ``zero_grad`` has since set the gradient to ``None`` or to zero."""
    grad = param.grad
    if grad is None:
        return True
    return (grad is not left or grad._version != version) and not grad.any()


def _mean(mean: Tensor | None, new: Tensor | None, share: float) -> Tensor | None:
    """Merge the gradient ``new`` into ``mean`` with this share. With share 0, ``new`` may be NaN.

    ``new`` is not modified, because tensors that the backward still uses may be views of it.
    """
    if mean is None:
        if new is None or share == 1:
            return new
        return new * share if share else torch.zeros_like(new)
    if share == 0:
        return mean
    if new is None:
        return mean.zero_() if share == 1 else mean.mul_(1 - share)
    if mean.layout is torch.strided and new.layout is torch.strided:
        return mean.copy_(new) if share == 1 else mean.lerp_(new, share)
    if share == 1:
        return new
    # The sum of a sparse and a dense tensor is dense: add to the dense one.
    first, second = mean.mul_(1 - share), new * share
    return second.add_(first) if first.is_sparse else first.add_(second)
