"""What is compared: the unwrapped model, stock DDP in each of its modes, and tritonddp."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import tritonddp

Wrapper = Callable[..., nn.Module]


@dataclass(frozen=True)
class Configuration:
    """One way to train a model.

    Attributes:
        name: unique; the key of results.
        wrapper: the class that wraps the model, ``None`` for the bare model.
        options: its keyword arguments.
    """

    name: str
    wrapper: Wrapper | None
    options: Mapping[str, bool] = field(default_factory=dict)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as this configuration trains it; collective."""
        return model if self.wrapper is None else self.wrapper(model, **self.options)


@dataclass(frozen=True)
class Family:
    """Configurations that are compared like against like.

    Attributes:
        name: of the mode: gradients are copies, or views of the buckets.
        ours: tritonddp.
        stock: stock DDP's configurations; the best of them is what ours is measured by.
        again: the first of ``stock`` once more, as a model of its own: how far two medians of
            the same thing lie apart.
    """

    name: str
    ours: Configuration
    stock: tuple[Configuration, ...]
    again: Configuration

    @property
    def members(self) -> tuple[Configuration, ...]:
        return (*self.stock, self.again, self.ours)


UNWRAPPED = Configuration("unwrapped", None)


def has_batched_grad_copy() -> bool:
    """Whether the installed torch's DDP can copy gradients a bucket at a time (torch 2.13)."""
    return "batched_grad_copy" in inspect.signature(StockDDP).parameters


def families() -> tuple[Family, Family]:
    """Copies and views."""
    return _family("copies", "", {}), _family("views", " views", {"gradient_as_bucket_view": True})


def _family(name: str, suffix: str, mode: Mapping[str, bool]) -> Family:
    stock = [Configuration("stock" + suffix, StockDDP, mode)]
    if has_batched_grad_copy():
        options = {**mode, "batched_grad_copy": True}
        stock.append(Configuration("stock batched" + suffix, StockDDP, options))
    return Family(
        name=name,
        ours=Configuration("ours" + suffix, tritonddp.DistributedDataParallel, mode),
        stock=tuple(stock),
        again=Configuration("stock again" + suffix, StockDDP, mode),
    )
