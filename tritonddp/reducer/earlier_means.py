"""Results of earlier reductions that are in ``.grad`` when another backward is reduced.

They would be averaged a second time. For the plain mean this is harmless: the mean of equal numbers
is that number. It is wrong for a sum, whatever its divisor, and for a mean that only the owner of a
parameter holds. In these cases the earlier results are set aside until the reduction has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tritonddp.comm.reduction import LocalError, Reduction
from tritonddp.coordination.failures import listed
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward

# Attribute of a gradient tensor that holds a reduction result. A new gradient tensor lacks it.
_MARK = "_tritonddp_is_reduced"


class EarlierMeans(Extension):
    """Remove earlier means from ``.grad`` before a reduction, and add them after it.

    Args:
        params: returns the affected parameters with their names.
        option: the option that requires this class, for error messages.
        is_reduced: ``.grad`` already holds means.
    """

    def __init__(
        self,
        params: Callable[[], Iterable[tuple[str, Tensor]]],
        option: str,
        is_reduced: bool = False,
    ) -> None:
        self._params, self._option = params, option
        self.reads_device = f"which gradients are already reduced ({option})"
        # No backward has added to the gradients since the last reduction.
        self.is_reduced = False
        if is_reduced:
            self._mark_reduced()
        # Gradients that may be the sum of a mean and of a local gradient.
        self._mixed: list[tuple[str, Tensor]] = []
        self._aside: dict[Tensor, Tensor] = {}

    def take_over(self, former: EarlierMeans) -> None:
        """Take over the state of another instance for the same gradients."""
        self.is_reduced |= former.is_reduced
        self._mixed = former._mixed

    def on_begin(self, backward: Backward) -> None:
        """Set the means aside, unless the backward is local.

        Raises:
            RuntimeError: a local gradient was added to a mean, in an earlier backward, or in
                this one before the backward was noticed.
        """
        means = self.means(backward.first_param)
        self.is_reduced = False
        if backward.reduction is not None:
            self._check(backward.where)
            if added := [name for name, param in means if param is backward.first_param]:
                raise RuntimeError(
                    f"{backward.where}: this backward computed the gradient of {added[0]!r} before "
                    "it reached an output of the wrapped module, and autograd added it to a "
                    f"gradient that is already reduced. {self._option} must keep the two separate. "
                    "Call zero_grad(set_to_none=True) before the backward, and accumulate "
                    "gradients inside no_sync()"
                )
            self.set_aside(means)
        else:
            self._mixed = held(means or self._mixed)

    def means(self, first_param: Tensor | None = None) -> list[tuple[str, Tensor]]:
        """Return the parameters whose gradients are means.

        ``first_param`` is included only if its new gradient was added to a mean. Usually the tensor
        of its ``.grad`` tells. With ``create_graph=True``, autograd replaces that tensor, and the
        tensors of the other gradients decide.
        """
        means = list(self._params()) if self.is_reduced else []
        asked = [param for _, param in means if param is first_param or torch.is_grad_enabled()]
        is_added = first_param is None or any(hasattr(each.grad, _MARK) for each in asked)
        return [each for each in means if is_added or each[1] is not first_param]

    def on_request(self, reduction: Reduction) -> None:
        """Reduce everything in ``.grad``, unless a local gradient was added to a mean."""
        self._check(reduction.where)

    @torch.no_grad()
    def set_aside(self, means: Iterable[tuple[str, Tensor]]) -> None:
        """Set copies of the means aside, since ``.grad`` may be a bucket view."""
        self._aside = {p: p.grad.clone() for _, p in means if p.grad is not None}
        for param in self._aside:
            param.grad.zero_()  # type: ignore[union-attr]

    @torch.no_grad()
    def _put_back(self) -> None:
        for param, mean in self._aside.items():
            param.grad = mean if param.grad is None else param.grad.add_(mean)
        self._aside = {}

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Add the earlier means. From now on, ``.grad`` holds means until a backward adds to it."""
        self._put_back()
        self.is_reduced, self._mixed = True, []

    def on_close(self, reduction: Reduction | None) -> None:
        """Mark the gradients, which may have been moved to new buckets."""
        if self.is_reduced:
            self._mark_reduced()

    def _mark_reduced(self) -> None:
        self.is_reduced = True
        for _, param in self._params():
            if param.grad is not None:
                setattr(param.grad, _MARK, True)

    def on_abort(self, reduction: Reduction | None) -> None:
        """Restore the gradients as the backward left them.

        After a failed reduction, some may be reduced, and others not.
        """
        self._put_back()
        if reduction is not None:
            self.is_reduced = False
            self._mixed = [each for each in self._params() if each[1].grad is not None]

    def _check(self, where: str) -> None:
        self._mixed = held(self._mixed)
        if self._mixed:
            names = listed([name for name, _ in self._mixed])
            raise LocalError(
                f"{where}: {self._option} cannot reduce the gradients of {names}: a local or "
                "failed backward added them to gradients that are already reduced. Call "
                "zero_grad() of the module after a failed backward, and before the first backward "
                "inside no_sync(). zero_grad() of an optimizer skips parameters that it does not "
                "train"
            )


@torch.no_grad()
def held(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the parameters whose gradients were neither dropped nor set to zero."""
    grads = ((name, param, param.grad) for name, param in named)
    return [(n, param) for n, param, grad in grads if grad is not None and bool(grad.norm() != 0)]
