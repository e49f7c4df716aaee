"""Which parameters will a backward reach? What is asked of the autograd engine, and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter

from tritonddp._torch import gradient_node, will_engine_execute


def gradient_nodes(params: Sequence[Parameter]) -> list[Any]:
    """The AccumulateGrad node of each parameter; a RuntimeError if one has none."""
    nodes: list[Any] = [gradient_node(param) for param in params]
    for node, param in zip(nodes, params, strict=True):
        if getattr(node, "variable", None) is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} and type {type(param).__name__} "
                f"accumulates no gradients (its autograd node is {node.name()}): it could not "
                "be synchronised"
            )
    return nodes


@contextmanager
def as_trainable(params: Iterable[Parameter]) -> Iterator[None]:
    """Context: parameters that have been frozen let hooks be registered all the same."""
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def accumulates(node: Any) -> bool:
    """Whether the backward that runs through ``node`` accumulates into leaves.

    True for ``backward()``, False for ``torch.autograd.grad``: that one runs no AccumulateGrad
    node. Needed only to tell the two apart when no parameter is reached; follows one path of the
    graph from ``node`` to its first leaf.
    """
    while True:
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if not parents:
            return bool(will_engine_execute([node]))
        leaves = [parent for parent in parents if hasattr(parent, "variable")]
        if leaves:
            return any(will_engine_execute(leaves) or ())
        node = parents[0]


class ReentrantGrads:
    """Parameters that may get a gradient, or another one, although the engine does not announce it.

    That is what reentrant checkpoints do: they run inner backwards. Once one has been seen, no
    other parameter is above suspicion. Until then a parameter is that is missing for the first
    time: the end of that backward tells whether it comes all the same.

    Parameters are known by their numbers.
    """

    def __init__(self) -> None:
        self.has_come = False  # a gradient has, from an inner backward
        self._came: set[int] = set()
        self._stayed_away: set[int] = set()
        self.suspected: set[int] = set()  # missing in this backward for the first time

    def may_come(self, missing: set[int]) -> set[int]:
        """A backward begins for which the engine has announced all but ``missing``."""
        self.suspected = missing - self._stayed_away
        return self._came | missing if self._came else self.suspected

    def came(self, number: int) -> None:
        """A gradient has come from an inner backward."""
        self._came.add(number)
        self.has_come = True

    def stayed_away(self, numbers: Iterable[int] | None = None) -> None:
        """The backward is over: ``numbers``, by default all suspected, have not come.

        (Those that have, :meth:`came`, stay suspected all the same.)
        """
        self._stayed_away.update(self.suspected if numbers is None else numbers)
        self.suspected = set()

    def renumber(self, former: Sequence[int | None]) -> None:
        """Parameter ``i`` was ``former[i]`` until now, or is new."""
        self._came = {new for new, old in enumerate(former) if old in self._came}
        self._stayed_away = {new for new, old in enumerate(former) if old in self._stayed_away}
