"""What is compared: the unwrapped model, stock DDP in its modes, and tritonddp in its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
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
        error: how far its gradients may be off stock's, of their norm, beyond rounding in fp32.
    """

    name: str
    wrapper: Wrapper | None
    options: Mapping[str, Any] = field(default_factory=dict)
    error: float = 0.0

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
        beside: measured too, but not part of the comparison.
    """

    name: str
    ours: Configuration
    stock: tuple[Configuration, ...]
    again: Configuration
    beside: tuple[Configuration, ...]

    @property
    def members(self) -> tuple[Configuration, ...]:
        return (*self.stock, self.again, self.ours, *self.beside)


UNWRAPPED = Configuration("unwrapped", None)


def has_batched_grad_copy() -> bool:
    """Whether the installed torch's DDP can copy gradients a bucket at a time (torch 2.13)."""
    return "batched_grad_copy" in inspect.signature(StockDDP).parameters


def families(unused: bool = False) -> tuple[Family, Family]:
    """Copies and views.

    Args:
        unused: for models with unused parameters, which stock trains with
            ``find_unused_parameters=True`` alone. On other models that option is measured beside,
            as is, with copies, tritonddp's strict mode, which such a model does not permit.
    """
    return (
        _family("copies", "", {}, unused, strict=not unused),
        _family("views", " views", {"gradient_as_bucket_view": True}, unused),
    )


def wires() -> tuple[Family, ...]:
    """Ways to send fewer bytes, each against stock in fp32.

    fp32 first, then those of tritonddp; stock's fp16 hook is measured beside. (Its bf16 hook
    refuses the CPU.)
    """
    hook = Configuration("stock fp16 hook", _stock_with_fp16_hook, error=1e-2)
    return tuple(
        _wire(name, *WIRES[name], () if number else (hook,)) for number, name in enumerate(WIRES)
    )


def chosen_wire() -> Family:
    """What ``compression="auto"`` chooses, against stock in fp32.

    It chooses by the line that it finds when it wraps the model.
    """
    return _wire("auto", {"compression": "auto"}, 5e-2)


def _wire(
    name: str, options: Mapping[str, Any], error: float, beside: tuple[Configuration, ...] = ()
) -> Family:
    stock, again = Configuration("stock", StockDDP), Configuration("stock again", StockDDP)
    ours = Configuration(f"ours {name}", tritonddp.DistributedDataParallel, options, error)
    return Family(name, ours, (stock,), again, beside)


# Options, and how far gradients may be off: half a step of the wire's numbers for each cast.
WIRES: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 0.0),
    "bf16": ({"reduce_dtype": torch.bfloat16}, 1e-2),
    "fp16": ({"reduce_dtype": torch.float16}, 1e-2),
    "int8": ({"compression": "int8"}, 5e-2),
}


def _stock_with_fp16_hook(model: nn.Module) -> nn.Module:
    wrapped = StockDDP(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def _family(
    name: str, suffix: str, mode: Mapping[str, bool], unused: bool, strict: bool = False
) -> Family:
    def stock(label: str, **options: bool) -> Configuration:
        return Configuration(f"stock {label}".strip() + suffix, StockDDP, {**mode, **options})

    def ours(label: str, **options: bool) -> Configuration:
        wrapper = tritonddp.DistributedDataParallel
        return Configuration(f"ours {label}".strip() + suffix, wrapper, {**mode, **options})

    searching = {"find_unused_parameters": True}
    label, needed = ("find_unused", searching) if unused else ("", {})
    candidates = [stock(label, **needed)]
    if has_batched_grad_copy():
        candidates.append(stock(f"batched {label}".strip(), batched_grad_copy=True, **needed))
    beside = [] if unused else [stock("find_unused", **searching)]
    if strict:
        beside.append(ours("strict", find_unused_parameters=False))
    return Family(
        name=name,
        ours=ours(""),
        stock=tuple(candidates),
        again=stock("again", **needed),
        beside=tuple(beside),
    )
