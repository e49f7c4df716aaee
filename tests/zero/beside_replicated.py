"""A module trained by ``ZeroRedundancyOptimizer``, and a copy of it by the plain optimizer.

    pair = Pair(mlp(4, 8, 2), AdamW, lr=0.1)
    for number in range(5):
        pair.step(drawn(5, 4, step=number))

Both are wrapped by ours with the same options, so that values have the same bits.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distributed import assert_same_bits, assert_same_on_all_ranks
from torch import Tensor, nn
from training import squares

from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer

# Of wrappers: how values and gradients travel.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "memory": {"transport": "auto"},
    "process group": {"transport": "process_group"},
}


def all_params(net: nn.Module) -> Any:
    """What an optimizer is usually given."""
    return net.parameters()


class Pair:
    """See above.

    Args:
        module: wrapped twice.
        optimizer_class: steps the parameters.
        params: of a wrapper, what its optimizer is given.
        wrapper: options of both wrappers, or what makes them from a module.
        tolerance: of values; without one they have the same bits.
        options: of the optimizer.

    Attributes:
        zero, plain: the two wrappers.
        optimizer, oracle: their optimizers.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: Any = torch.optim.AdamW,
        params: Callable[[nn.Module], Any] = all_params,
        wrapper: dict[str, Any] | Callable[[nn.Module], dict[str, Any]] | None = None,
        tolerance: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        options = {"lr": 0.05, **options}
        self.tolerance = tolerance
        self.zero, self.plain = (
            DistributedDataParallel(each, **(wrapper(each) if callable(wrapper) else wrapper or {}))
            for each in (module, copy.deepcopy(module))
        )
        self.optimizer = ZeroRedundancyOptimizer(params(self.zero), optimizer_class, **options)
        self.oracle = optimizer_class(params(self.plain), **options)

    def each(self) -> Iterator[tuple[DistributedDataParallel, Any]]:
        """The wrappers, each with its optimizer."""
        yield self.zero, self.optimizer
        yield self.plain, self.oracle

    def step(
        self, *inputs: Any, between: Callable[[Any, Any], Any] | None = None, **kwargs: Any
    ) -> None:
        """One step of both, which end alike.

        Args:
            between: called with wrapper and optimizer, after the backward.
        """
        for net, optimizer in self.each():
            squares(net(*inputs, **kwargs)).backward()
            if between is not None:
                between(net, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        self.check()

    def end(self, what: str = "") -> None:
        """Both optimizers step, and end alike."""
        for _, optimizer in self.each():
            optimizer.step()
            optimizer.zero_grad()
        self.check(what)

    def check(self, what: str = "") -> None:
        """Values are those of the plain optimizer, and the same on all ranks."""
        zero = dict(self.zero.module.named_parameters())
        plain = dict(self.plain.module.named_parameters())
        if self.tolerance is None:
            assert_same_bits(zero, plain, what)
        else:
            torch.testing.assert_close(zero, plain, **self.tolerance)
        assert_same_on_all_ranks(list(zero.values()), what)


def owner_of(optimizer: ZeroRedundancyOptimizer, param: Tensor) -> int | None:
    """The rank that steps it; ``None`` if the optimizer does not have it."""
    return optimizer._owners.get(param)
