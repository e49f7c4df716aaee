"""Which parameters will this backward reach? Asked of the autograd engine when it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter

from tritonddp._torch import gradient_node, will_engine_execute


class Participation:
    """The AccumulateGrad nodes of the parameters, and what the engine says of them.

    No graph is walked and no output looked at: the engine has just computed which nodes it will
    run, so the answer is right for any loss and any way of using the parameters.

    Attributes:
        nodes: the AccumulateGrad node of each parameter. Holding them keeps them, and the hooks
            registered on them, alive: autograd itself refers to them only weakly.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.nodes: list[Any] = [gradient_node(param) for param in params]
        for node, param in zip(self.nodes, params, strict=True):
            if getattr(node, "variable", None) is None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} and type {type(param).__name__} "
                    f"accumulates no gradients (its autograd node is {node.name()}): it could not "
                    "be synchronised"
                )

    def query(self) -> list[bool] | None:
        """For each parameter, whether the backward that runs on this thread will reach it.

        ``None`` for ``torch.autograd.grad`` with respect to some of the parameters. To be called
        from a hook. Blind to inner backwards of reentrant checkpoints.
        """
        return will_engine_execute(self.nodes)


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


class Unannounced:
    """Parameters that may get a gradient, or another one, although the engine does not announce it.

    That is what reentrant checkpoints do: they run inner backwards. Once one has been seen, no
    other parameter is above suspicion. Until then a parameter is that is missing for the first
    time: the end of that backward tells whether it comes all the same.

    Parameters are known by their numbers.
    """

    def __init__(self) -> None:
        self._came: set[int] = set()
        self._stayed_away: set[int] = set()
        self._suspected: set[int] = set()

    def may_come(self, missing: set[int]) -> set[int]:
        """A backward begins for which the engine has announced all but ``missing``."""
        self._suspected = missing - self._stayed_away
        return self._came | missing if self._came else self._suspected

    def came(self, number: int) -> None:
        """A gradient has come from an inner backward."""
        self._came.add(number)

    def stayed_away(self, numbers: Iterable[int] | None = None) -> None:
        """The backward is over: ``numbers``, by default all suspected, have not come.

        (Those that have, :meth:`came`, stay suspected all the same.)
        """
        self._stayed_away.update(self._suspected if numbers is None else numbers)
        self._suspected = set()

    def renumber(self, former: Sequence[int | None]) -> None:
        """Parameter ``i`` was ``former[i]`` until now, or is new."""
        self._came = {new for new, old in enumerate(former) if old in self._came}
        self._stayed_away = {new for new, old in enumerate(former) if old in self._stayed_away}


class Constancy:
    """Whether every reduced backward so far has reached the same parameters on this rank.

    Attributes:
        missing: numbers of those that the last one has not reached.
        is_static: none reached others.
    """

    def __init__(self) -> None:
        self.missing: set[int] | None = None
        self.is_static = True

    def see(self, missing: set[int]) -> None:
        """A backward begins that will not reach these."""
        if self.missing is not None and missing != self.missing:
            self.is_static = False
        self.missing = missing

    def renumber(self, former: Sequence[int | None]) -> None:
        """Parameter ``i`` was ``former[i]`` until now, or is new."""
        if self.missing:
            self.missing = {new for new, old in enumerate(former) if old in self.missing}
