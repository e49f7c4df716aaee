"""A module trained by ``ZeroRedundancyOptimizer``, and a copy of it by the plain optimizer."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distributed import assert_same_bits, assert_same_on_all_ranks
from torch import Tensor, nn
from training import squares

from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer


class Pair:
    """A module with ``ZeroRedundancyOptimizer``, and a copy of it with the plain optimizer.

    Both wrappers have the same options, so that the values have the same bits.

    Args:
        params: a function that returns the parameters of a wrapper for its optimizer.
        wrapper: options of both wrappers.
        options: of the optimizers.

    Attributes:
        zero, plain: the two wrappers.
        optimizer, oracle: their optimizers.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: Any = torch.optim.AdamW,
        params: Callable[[nn.Module], Any] = nn.Module.parameters,
        wrapper: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        options = {"lr": 0.05, **options}
        self.zero, self.plain = (
            DistributedDataParallel(each, **(wrapper or {}))
            for each in (module, copy.deepcopy(module))
        )
        self.optimizer = ZeroRedundancyOptimizer(params(self.zero), optimizer_class, **options)
        self.oracle = optimizer_class(params(self.plain), **options)

    def each(self) -> Iterator[tuple[DistributedDataParallel, Any]]:
        """The wrappers, each with its optimizer."""
        yield self.zero, self.optimizer
        yield self.plain, self.oracle

    def step(self, *inputs: Any, **kwargs: Any) -> None:
        """One step of both, which must end with the same values."""
        for net, _ in self.each():
            squares(net(*inputs, **kwargs)).backward()
        self.end()

    def end(self) -> None:
        """Step both optimizers, which must end with the same values."""
        for _, optimizer in self.each():
            optimizer.step()
            optimizer.zero_grad()
        self.check()

    def check(self, what: str = "") -> None:
        """The values are the same on all ranks, and are the values of the plain optimizer."""
        zero = dict(self.zero.module.named_parameters())
        assert_same_bits(zero, dict(self.plain.module.named_parameters()), what)
        assert_same_on_all_ranks(list(zero.values()), what)


def owner_of(optimizer: ZeroRedundancyOptimizer, param: Tensor) -> int | None:
    """The rank that steps the parameter; ``None`` if the optimizer does not have it."""
    return optimizer._owners.get(param)
