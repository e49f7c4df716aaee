"""Results of earlier reductions that are in ``.grad`` when a backward is reduced on top of them.

They would be sent again. A mean of equal numbers is that number, so that the plain mean bears it. A
sum is not, whatever it is divided by; nor is the mean where the owner of a parameter alone has its
gradient. There they are set aside until the reduction is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tritonddp.comm.reduction import LocalError, Reduction
from tritonddp.coordination.failures import listed
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward

# Attribute of a gradient that a reduction has left: one that comes after it was dropped has none.
_MARK = "_tritonddp_is_reduced"


class EarlierMeans(Extension):
    """Takes them out of ``.grad`` before a reduction, and adds them after it.

    Args:
        params: returns the parameters whose gradients they are, with their names.
        option: what needs that, in errors.
        is_reduced: ``.grad`` holds some already.
    """

    def __init__(
        self,
        params: Callable[[], Iterable[tuple[str, Tensor]]],
        option: str,
        is_reduced: bool = False,
    ) -> None:
        self._params, self._option = params, option
        self.reads_device = f"which gradients are reduced already ({option})"
        # No backward has added to the gradients since the last reduction.
        self.is_reduced = False
        if is_reduced:
            self._mark_reduced()
        self._mixed: list[tuple[str, Tensor]] = []  # to whose means a local one has
        self._aside: dict[Tensor, Tensor] = {}

    def take_over(self, former: EarlierMeans) -> None:
        """Go on from another one, of the same gradients."""
        self.is_reduced |= former.is_reduced
        self._mixed = former._mixed

    def on_begin(self, backward: Backward) -> None:
        """Take the means out, unless the backward is local.

        Raises:
            RuntimeError: a local backward has added to them, or this one before it was noticed.
        """
        means = self.means(backward.first_param)
        if backward.reduction is not None:
            self._check(backward.where)
            if added := [name for name, param in means if param is backward.first_param]:
                raise RuntimeError(
                    f"{backward.where}: the gradient of {added[0]!r}, which this backward has made "
                    "before it came to an output of the wrapped module, was added to one that is "
                    f"reduced already, which {self._option} would have to keep apart: drop "
                    "gradients by zero_grad(set_to_none=True) before it, and accumulate under "
                    "no_sync()"
                )
            self.set_aside(means)
        else:
            self._mixed = held(means or self._mixed)
        self.is_reduced = False

    def means(self, first_param: Tensor | None = None) -> list[tuple[str, Tensor]]:
        """Whose gradients are means: not that of the ``late`` one, if it was not added to one.

        (With ``create_graph=True`` another tensor takes the place of the mean: the others tell.)
        """
        means = list(self._params()) if self.is_reduced else []
        asked = [param for _, param in means if param is first_param or torch.is_grad_enabled()]
        is_added = first_param is None or any(hasattr(each.grad, _MARK) for each in asked)
        return [each for each in means if is_added or each[1] is not first_param]

    def on_request(self, reduction: Reduction) -> None:
        """All that is in ``.grad`` is meant, if no backward has run since the last reduction."""
        self._check(reduction.where)

    @torch.no_grad()
    def set_aside(self, means: Iterable[tuple[str, Tensor]]) -> None:
        """A reduction begins. (Copies: ``.grad`` may be a view of its bucket.)"""
        self._aside = {p: p.grad.clone() for _, p in means if p.grad is not None}
        for param in self._aside:
            param.grad.zero_()  # type: ignore[union-attr]

    @torch.no_grad()
    def _put_back(self) -> None:
        for param, mean in self._aside.items():
            param.grad = mean if param.grad is None else param.grad.add_(mean)
        self._aside = {}

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Add the earlier means."""
        self._put_back()

    def on_close(self, reduction: Reduction | None) -> None:
        """After a reduction ``.grad`` holds means, until a backward adds to it."""
        if reduction is not None:
            self._mixed = []
            self._mark_reduced()

    def _mark_reduced(self) -> None:
        self.is_reduced = True
        for _, param in self._params():
            if param.grad is not None:
                setattr(param.grad, _MARK, True)

    def on_abort(self, reduction: Reduction | None) -> None:
        """The gradients are as the backward has left them."""
        self._put_back()

    def _check(self, where: str) -> None:
        self._mixed = held(self._mixed)
        if self._mixed:
            names = listed([name for name, _ in self._mixed])
            raise LocalError(
                f"{where}: {self._option} cannot reduce gradients of a local backward that were "
                f"added to gradients which are reduced already: of {names}. Drop those before the "
                "first backward under no_sync() (zero_grad() of the module; that of an optimizer "
                "leaves out what it does not train), or reduce all backwards"
            )


@torch.no_grad()
def held(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Those whose gradients were neither dropped nor set to zero."""
    grads = ((name, param, param.grad) for name, param in named)
    return [(n, param) for n, param, grad in grads if grad is not None and bool(grad.norm() != 0)]
