"""The configurations to compare: the unwrapped model, and the modes of stock DDP and tritonddp."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import tritonddp

Wrapper = Callable[..., nn.Module]


@dataclass(frozen=True)
class Configuration:
    """One way to train a model.

    Attributes:
        error: tolerated difference of its gradients from stock's, relative to their norm, in
            addition to fp32 rounding.
        is_idle: ours in a world of one sends nothing. Otherwise, it sends there too, as stock does.
    """

    name: str  # unique; the key of results
    wrapper: Wrapper | None  # the class that wraps the model, None for the bare model
    options: Mapping[str, Any] = field(default_factory=dict)  # its keyword arguments
    error: float = 0.0
    is_idle: bool = False
    is_compiled: bool = False  # by inductor, as torch.compile of the wrapper does it

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in this configuration; collective."""
        if self.wrapper is None:
            return model
        reducer: Any = sys.modules.get("tritonddp.reducer.autograd_driver")
        as_with_many: Any = nullcontext()
        if reducer is not None and not self.is_idle:
            as_with_many = patch.object(reducer.AutogradDriver, "exchanges_alone", True)
        with as_with_many:
            module = Network(model) if self.is_compiled else model
            wrapped: Any = self.wrapper(module, **self.options)
        if self.is_compiled:
            wrapped.compile()
        if hasattr(wrapped, "_ddp_state") and not self.is_idle:  # ours, of any revision
            core = wrapped._ddp_state.core
            getattr(core, "reductions", core).exchanges_alone = True
        return wrapped


class Network(nn.Module):
    """Runs a module in a ``forward`` that is not torch's. In stock DDP, dynamo skips frames of
    torch's modules, for example of a Sequential, and would then compile nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Any) -> Any:
        return self.module(inputs)


@dataclass(frozen=True)
class Family:
    """Configurations of one mode, which are compared with each other.

    Attributes:
        stock: configurations of stock DDP; ours is compared with the best of them.
        alike: two identical configurations with separate models: the difference of their medians
            is the noise.
    """

    name: str  # of the mode: copied gradients, views of the buckets, or the wire
    ours: Configuration  # tritonddp
    stock: tuple[Configuration, ...]
    alike: tuple[Configuration, Configuration]
    beside: tuple[Configuration, ...] = ()  # measured too, but not compared

    @property
    def members(self) -> tuple[Configuration, ...]:
        """Return all configurations, without duplicates."""
        return once((*self.stock, *self.alike, self.ours, *self.beside))


def once(configurations: Iterable[Configuration]) -> tuple[Configuration, ...]:
    """Return the configurations without duplicate names."""
    return tuple({each.name: each for each in configurations}.values())


Families = tuple[Family, ...]
UNWRAPPED = Configuration("unwrapped", None)
UNWRAPPED_AGAIN = Configuration("unwrapped again", None)
BARE = (UNWRAPPED, UNWRAPPED_AGAIN)


def takes(option: str) -> bool:
    """Return True if the installed stock DDP has an option (``batched_grad_copy``: 2.13)."""
    return option in inspect.signature(StockDDP).parameters


def families(unused: bool = False) -> tuple[Family, Family]:
    """Return the families of copied gradients and of views.

    Args:
        unused: for models with unused parameters, for which stock DDP needs
            ``find_unused_parameters=True``.
    """
    found = []
    for name, mode in MODES.items():
        suffix = "" if name == "copies" else f" {name}"
        if unused:
            searching = {**mode, "find_unused_parameters": True}
            stock = _ways(_stock("stock find_unused" + suffix, searching))
        else:
            stock = _ways(_stock("stock" + suffix, mode))
        again = replace(stock[0], name="stock again" + suffix)
        found.append(Family(name, _ours("ours" + suffix, mode), stock, (stock[0], again)))
    # If ranks use different parameters, the collectives of FSDP2 do not match.
    return (found[0] if unused else replace(found[0], beside=fsdp2())), found[1]


def fsdp2() -> tuple[Configuration, ...]:
    """Return FSDP2's wrappers, applied as in PyTorch's tutorial: to each layer, then to the root.

    A layer is a module of a ``ModuleList`` or ``Sequential``.
    """
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:  # torch before 2.9
        return ()
    from torch.distributed.fsdp import fully_shard

    def applied(wrap: Callable[[nn.Module], Any]) -> Wrapper:
        def apply(model: nn.Module) -> nn.Module:
            for module in model.modules():
                if isinstance(module, nn.ModuleList | nn.Sequential):
                    for layer in module:
                        wrap(layer)
            wrap(model)
            return model

        return apply

    return (
        Configuration("FSDP2 replicate", applied(replicate)),
        Configuration("FSDP2 fully_shard", applied(fully_shard)),
    )


def compiled() -> Family:
    """Return the compiled wrappers: stock's graph is split at its buckets, ours is one graph.
    Graphs are fused differently, so gradients may differ slightly."""
    stock, again, ours = (
        replace(each, name=f"{each.name} compiled", is_compiled=True, error=1e-4)
        for each in (_stock("stock", {}), _stock("stock again", {}), _ours("ours", {}))
    )
    return Family("compiled", ours, (stock,), (stock, again))


def on_cards(
    names: Iterable[str],
    sizes: Callable[[Configuration], Sequence[float]],
    unused: bool = False,
    alone: bool = False,
) -> Families:
    """Return copies, views and wires as they are compared on GPUs, by name.

    For copies and views, stock has its default bucket sizes, and also ours. A second bare model
    shows the noise of overheads.

    Args:
        sizes: sizes of our buckets in MiB, in launch order.
        alone: there is one rank: idle ours, which sends nothing, is measured too.
    """
    modes = {each.name: each for each in (*families(unused), *wires(), compiled())}
    found = []
    for name in names:
        one = modes[name]
        if name in MODES:
            own = sizes(one.ours)
            stock = (*one.stock, *(with_sizes(each, own) for each in one.stock))
            beside = (idle_of(one.ours),) if alone else ()
            one = Family(name, one.ours, stock, BARE, beside)
        found.append(one)
    return tuple(found)


def idle_of(ours: Configuration) -> Configuration:
    """Return the same configuration as users get it with one rank, which sends nothing."""
    return replace(ours, name=ours.name.replace("ours", "ours idle"), is_idle=True)


def with_sizes(stock: Configuration, sizes: Sequence[float]) -> Configuration:
    """Return stock with buckets of these sizes in MiB, or of the largest if it takes no list."""
    given: dict[str, Any] = {"bucket_cap_mb_list": list(sizes)}
    if not takes("bucket_cap_mb_list"):
        given = {"bucket_cap_mb": max(sizes)}
    name = stock.name.replace("stock", "stock sized")
    return replace(stock, name=name, options={**stock.options, **given})


def through(ours: Configuration, transport: str, label: str | None = None) -> Configuration:
    """Return ours with a transport, for example ``"process_group"`` instead of shared memory."""
    return replace(ours, name=label or ours.name, options={**ours.options, "transport": transport})


def wires() -> Families:
    """Return the wire formats with fewer bytes, each compared with stock in fp32."""
    stock, again = _stock("stock", {}), _stock("stock again", {})
    return tuple(
        Family(name, _ours(f"ours {name}", *options), (stock,), (stock, again))
        for name, options in WIRES.items()
    )


# Options, and tolerated errors: half a step of the wire's numbers for each cast.
WIRES: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 0.0),
    "bf16": ({"reduce_dtype": torch.bfloat16}, 1e-2),
    "int8": ({"compression": "int8"}, 5e-2),
}
MODES: dict[str, dict[str, Any]] = {"copies": {}, "views": {"gradient_as_bucket_view": True}}


def _stock(name: str, options: Mapping[str, Any]) -> Configuration:
    return Configuration(name, StockDDP, options)


def _ours(name: str, options: Mapping[str, Any], error: float = 0.0) -> Configuration:
    return Configuration(name, tritonddp.DistributedDataParallel, options, error)


def _ways(stock: Configuration) -> tuple[Configuration, ...]:
    """Return stock as it is, and with gradients copied per bucket, if the version supports that."""
    if not takes("batched_grad_copy"):
        return (stock,)
    name = stock.name.replace("stock", "stock batched")
    return stock, replace(stock, name=name, options={**stock.options, "batched_grad_copy": True})
