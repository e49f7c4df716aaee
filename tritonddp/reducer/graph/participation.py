"""Which parameters will a backward reach? What the autograd engine can tell, and what it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import current_autograd_node, will_engine_execute, without_overrides


class _Joined(torch.autograd.Function):
    """A function whose node leads to those of all its inputs."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> Tensor:
        return torch.empty((), device="cpu")


def gradient_nodes(params: Sequence[Tensor]) -> list[Any]:
    """The autograd node that the gradient of each parameter goes to; ``None`` if it is frozen.

    As ``torch.autograd.graph.get_gradient_edge``, which takes ten times as long, and returns the
    node of a view for a parameter of a tensor subclass.
    """
    with torch.enable_grad(), without_overrides():
        node = _Joined.apply(*params).grad_fn
    return [None] * len(params) if node is None else [each for each, _ in node.next_functions]


def accumulating_nodes(params: Sequence[Parameter]) -> list[Any]:
    """The AccumulateGrad node of each parameter; a RuntimeError if one has none."""
    nodes = gradient_nodes(params)
    for node, param in zip(nodes, params, strict=True):
        if getattr(node, "variable", None) is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} and type {type(param).__name__} "
                f"accumulates no gradients (its autograd node is {node.name()}): it cannot be "
                "synchronised"
            )
    return nodes


@contextmanager
def as_trainable(params: Iterable[Parameter]) -> Iterator[None]:
    """Context: hooks can be registered on these parameters, although some are frozen."""
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def is_of_others(params: Sequence[Parameter]) -> bool:
    """Whether the backward that runs, and reaches none of ``params``, is none of the wrapper's.

    It is so for ``torch.autograd.grad``, and for ``backward(inputs=...)``, with respect to other
    tensors: the graph then has parameters that are not reached. Otherwise it is a backward that
    uses no parameter on this rank, and ranks that use some wait for it.
    """
    node = current_autograd_node()
    if not _accumulates(node):
        return True
    # (Not the nodes that our hooks are on: ``.data`` of another dtype, and back, brings others.)
    return any(param.requires_grad for param in params) and _leads_to(node, gradient_nodes(params))


def _accumulates(node: Any) -> bool:
    """Whether the backward that runs through ``node`` accumulates into leaves.

    True for ``backward()``, False for ``torch.autograd.grad``: that one runs no AccumulateGrad
    node. Follows one path of the graph from ``node`` to its first leaf.
    """
    while True:
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if not parents:
            return bool(will_engine_execute([node]))
        leaves = [parent for parent in parents if hasattr(parent, "variable")]
        if leaves:
            return any(will_engine_execute(leaves) or ())
        node = parents[0]


def _leads_to(node: Any, ends: Sequence[Any]) -> bool:
    """Whether the graph behind ``node`` has one of these nodes. Walks through it until it does."""
    wanted, seen, stack = set(ends), {node, None}, [node]
    while stack:
        for parent, _ in stack.pop().next_functions:
            if parent not in seen:
                if parent in wanted:
                    return True
                seen.add(parent)
                stack.append(parent)
    return False


class ReentrantGrads:
    """Parameters that may get a gradient, or a second one, that the engine has not announced.

    Such gradients come from inner backwards, which reentrant checkpoints run. The engine announces
    only the nodes of the outer backward. A parameter that it does not announce is *missing*, and
    *suspected* when that happens for the first time: the end of that backward shows whether its
    gradient comes all the same. Once an inner backward has been seen, any missing parameter may get
    a gradient.

    Parameters are given by their numbers.
    """

    def __init__(self) -> None:
        self.has_come = False  # a gradient has come from an inner backward
        self._seen: set[int] = set()
        self._stayed_away: set[int] = set()
        self.suspected: set[int] = set()  # missing in this backward for the first time

    def may_come(self, missing: set[int]) -> set[int]:
        """Numbers that may get a gradient in a backward that announces all but ``missing``."""
        self.suspected = missing - self._stayed_away
        return self._seen | missing if self._seen else self.suspected

    def note(self, number: int) -> None:
        """A gradient has come from an inner backward."""
        self._seen.add(number)
        self.has_come = True

    def stayed_away(self, numbers: Iterable[int] | None = None) -> None:
        """The backward is over: suspect ``numbers``, by default all suspected, no more.

        (Parameters noted by :meth:`note` are waited for all the same.)
        """
        self._stayed_away.update(self.suspected if numbers is None else numbers)
        self.suspected = set()

    def renumber(self, former: Sequence[int | None]) -> None:
        """Update numbers: parameter ``i`` had number ``former[i]``, or ``None`` if it is new."""
        self._seen = {new for new, old in enumerate(former) if old in self._seen}
        self._stayed_away = {new for new, old in enumerate(former) if old in self._stayed_away}
