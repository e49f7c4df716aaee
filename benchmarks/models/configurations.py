"""What is compared: the unwrapped model, stock DDP in its modes, and tritonddp in its own."""

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
        error: how far its gradients may be off stock's, of their norm, beyond rounding in fp32.
        is_idle: ours in a world of one, where it sends nothing. Otherwise it sends there too, as
            stock does.
    """

    name: str  # unique; the key of results
    wrapper: Wrapper | None  # the class that wraps the model, None for the bare model
    options: Mapping[str, Any] = field(default_factory=dict)  # its keyword arguments
    error: float = 0.0
    is_idle: bool = False
    is_compiled: bool = False  # by inductor, as torch.compile of the wrapper does it

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as this configuration trains it; collective."""
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
        if hasattr(wrapped, "_ddp_state") and not self.is_idle:  # ours, of whatever revision
            core = wrapped._ddp_state.core
            getattr(core, "reductions", core).exchanges_alone = True
        return wrapped


class Network(nn.Module):
    """A module behind a ``forward`` that is not torch's own: frames of torch's modules, of a
    Sequential say, dynamo skips within stock DDP, which then compiles nothing at all."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Any) -> Any:
        return self.module(inputs)


@dataclass(frozen=True)
class Family:
    """Configurations that are compared like against like.

    Attributes:
        stock: stock DDP's configurations; the best of them is what ours is measured by.
        alike: two of the same configuration, each a model of its own: how far two medians of the
            same thing lie apart.
    """

    name: str  # of the mode: gradients are copies, or views of the buckets; or the wire
    ours: Configuration  # tritonddp
    stock: tuple[Configuration, ...]
    alike: tuple[Configuration, Configuration]
    beside: tuple[Configuration, ...] = ()  # measured too, but not part of the comparison

    @property
    def members(self) -> tuple[Configuration, ...]:
        """Each once."""
        return once((*self.stock, *self.alike, self.ours, *self.beside))


def once(configurations: Iterable[Configuration]) -> tuple[Configuration, ...]:
    """Each name once."""
    return tuple({each.name: each for each in configurations}.values())


Families = tuple[Family, ...]
UNWRAPPED = Configuration("unwrapped", None)
UNWRAPPED_AGAIN = Configuration("unwrapped again", None)
BARE = (UNWRAPPED, UNWRAPPED_AGAIN)


def takes(option: str) -> bool:
    """Whether the installed torch's DDP knows an option: ``batched_grad_copy`` from 2.13 on."""
    return option in inspect.signature(StockDDP).parameters


def families(unused: bool = False) -> tuple[Family, Family]:
    """Copies and views.

    Args:
        unused: for models with unused parameters, which stock trains with
            ``find_unused_parameters=True`` alone.
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
    # (Where ranks use different parameters, FSDP2's collectives do not match.)
    return (found[0] if unused else replace(found[0], beside=fsdp2())), found[1]


def fsdp2() -> tuple[Configuration, ...]:
    """PyTorch's wrappers of FSDP2, as its tutorial applies them: to each layer, then to the root.

    A layer is a module of a ``ModuleList`` or ``Sequential``.
    """
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:  # of torch before 2.9
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
    """Wrappers that are compiled: stock's graph is split at its buckets, ours is one. Graphs are
    fused differently, so gradients may differ a little."""
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
    """Copies, views and wires as they are compared on GPUs, by name.

    Of copies and views stock has its own bucket sizes, and ours too. A second bare model shows what
    overheads cannot resolve.

    Args:
        sizes: of our buckets, in MiB, in the order of their launches.
        alone: there is one rank: ours is measured beside as users have it then, idle.
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
    """The same as users have it with one rank."""
    return replace(ours, name=ours.name.replace("ours", "ours idle"), is_idle=True)


def with_sizes(stock: Configuration, sizes: Sequence[float]) -> Configuration:
    """Stock with buckets of these sizes, in MiB; with the largest for all, if it takes no list."""
    given: dict[str, Any] = {"bucket_cap_mb_list": list(sizes)}
    if not takes("bucket_cap_mb_list"):
        given = {"bucket_cap_mb": max(sizes)}
    name = stock.name.replace("stock", "stock sized")
    return replace(stock, name=name, options={**stock.options, **given})


def through(ours: Configuration, transport: str, label: str | None = None) -> Configuration:
    """Ours by a transport: ``"process_group"``, where ranks of a host would share memory."""
    return replace(ours, name=label or ours.name, options={**ours.options, "transport": transport})


def wires() -> Families:
    """Ways to send fewer bytes, each against stock in fp32."""
    stock, again = _stock("stock", {}), _stock("stock again", {})
    return tuple(
        Family(name, _ours(f"ours {name}", *options), (stock,), (stock, again))
        for name, options in WIRES.items()
    )


# Options, and how far gradients may be off: half a step of the wire's numbers for each cast.
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
    """Stock as it is, and with gradients copied a bucket at a time, if it can."""
    if not takes("batched_grad_copy"):
        return (stock,)
    name = stock.name.replace("stock", "stock batched")
    return stock, replace(stock, name=name, options={**stock.options, "batched_grad_copy": True})
