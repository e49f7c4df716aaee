"""Small networks whose buffers are part of what they compute, and are written in all ways."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from differential.hostile.collectives import Layer
from differential.hostile.program import NetworkSpec

# Kinds of buffers, by name: made anew for each network.
BUFFERS: dict[str, Callable[[int], Tensor]] = {
    "shift": lambda width: torch.randn(width),
    "scale": lambda width: torch.rand(width) + 0.5,
    "factor": lambda width: torch.ones(()),
    "table": lambda width: torch.randn(width, 3).t(),  # transposed
    "count": lambda width: torch.zeros((), dtype=torch.int64),
    "mask": lambda width: torch.ones(width, dtype=torch.bool),
    "low": lambda width: torch.randn(width).bfloat16(),
    "wide": lambda width: torch.randn(width, dtype=torch.float64),
    "large": lambda width: torch.randn(40_000),
    "nothing": lambda width: torch.empty(0),
}


def _in_place(owner: nn.Module, name: str, value: Tensor) -> None:
    with torch.no_grad():
        getattr(owner, name).copy_(value)


def _through_data(owner: nn.Module, name: str, value: Tensor) -> None:
    getattr(owner, name).data.copy_(value)


def _as_data(owner: nn.Module, name: str, value: Tensor) -> None:
    getattr(owner, name).data = value.to(getattr(owner, name).dtype).clone()


def _reassigned(owner: nn.Module, name: str, value: Tensor) -> None:
    setattr(owner, name, value.to(getattr(owner, name).dtype).clone())


def _through_numpy(owner: nn.Module, name: str, value: Tensor) -> None:
    buffer = getattr(owner, name)
    if buffer.dtype is torch.bfloat16:  # which numpy does not know
        buffer.data.copy_(value)
    else:
        buffer.numpy()[...] = value.to(buffer.dtype).numpy()


def _by_a_state(owner: nn.Module, name: str, value: Tensor) -> None:
    owner.load_state_dict({name: value}, strict=False)


# How a buffer is written: with the module that owns it, its name, and the new value.
WAYS: dict[str, Callable[[nn.Module, str, Tensor], None]] = {
    "in place": _in_place,
    "through .data": _through_data,
    "as .data": _as_data,
    "reassigned": _reassigned,
    "through numpy": _through_numpy,
    "by load_state_dict": _by_a_state,
}
# Those that autograd does not see, so that a backward through an older forward goes on.
UNSEEN = ("through .data", "as .data", "reassigned", "through numpy")


class Buffers(nn.Module):
    """Computes with buffers, and keeps none of them for the backward."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        for kind in spec.buffers:
            self.register_buffer(kind, BUFFERS[kind](spec.width), persistent=kind != "low")

    def forward(self, x: Tensor) -> Tensor:
        for kind, buffer in self.named_buffers():
            value = buffer.detach().clone()
            match kind:
                case "shift" | "low" | "wide":
                    x = x + value.to(x.dtype)
                case "scale" | "mask" | "factor":
                    x = x * value.to(x.dtype)
                case "table" | "large":
                    x = x + value.sum().to(x.dtype) / value.numel()
                case "count":
                    x = x + 0.01 * value.to(x.dtype)
        return x


class Network(nn.Module):
    """Linear layers, buffers, and for some a BatchNorm.

    Args:
        spec: of the network.
        encoder: the first layer, where another network has it too.
    """

    def __init__(self, spec: NetworkSpec, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.forwards = 0
        self.encoder = encoder or nn.Linear(spec.width, spec.width)
        self.layers = nn.ModuleList(
            Layer(spec) if spec.collective else nn.Linear(spec.width, spec.width)
            for _ in range(spec.layers - 1)
        )
        self.norm = nn.BatchNorm1d(spec.width) if spec.has_norm else nn.Identity()
        self.state = Buffers(spec)
        # What users call their attributes.
        self.config, self.sync, self.group, self.caps = {"hidden": spec.width}, "sync", "group", 3
        if spec.overrides:
            part, cls = OVERRIDES[spec.overrides]
            self.get_submodule(part).__class__ = cls

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is (rows, width), and so is the result."""
        self.forwards += 1
        x = torch.tanh(self.encoder(x))
        if self._writes(self.spec.written_in_forward):
            self._write(self.spec.written_in_forward, x)
        if self._writes(self.spec.written_in_backward) and x.requires_grad:
            x.register_hook(lambda gradient: self._write(self.spec.written_in_backward, gradient))
        x = self.norm(self.state(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def submodule(self, x: Tensor) -> Tensor:
        """A part of it, with the first layer alone."""
        return torch.tanh(self.encoder(x))

    def penalty(self) -> Tensor:
        """By the parameters alone."""
        return torch.stack([param.pow(2).sum() for param in self.parameters()]).sum()

    def owned_buffers(self) -> Iterator[tuple[nn.Module, str]]:
        """Each buffer, as the module that owns it and the name that it has there."""
        for module in self.modules():
            for name in module._buffers:
                yield module, name

    def _writes(self, way: str) -> bool:
        return bool(way) and self.training and self.forwards > self.spec.quiet

    def _write(self, way: str, seen: Tensor) -> None:
        """A moving average of what this rank sees goes into the first of its buffers."""
        name = self.spec.buffers[0]
        buffer = getattr(self.state, name)
        value = seen.detach().mean().to(torch.float64)
        if buffer.dtype.is_floating_point:
            value = buffer.double() * 0.9 + value * 0.1
        else:
            value = buffer + 1
        WAYS[way](self.state, name, value.to(buffer.dtype))


class HidesParameters(Network):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return _without("weight", super().named_parameters(*args, **kwargs))


class RenamesParameters(Network):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        named = super().named_parameters(*args, **kwargs)
        return ((f"its_{name}", param) for name, param in named)


class HidesBuffers(Network):
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return _without("s", super().named_buffers(*args, **kwargs))


class HidesItsBias(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return _without("bias", super().named_parameters(*args, **kwargs))


def _without(part: str, named: Iterator[tuple[str, Any]]) -> Iterator[Any]:
    return (each for each in named if part not in each[0].rpartition(".")[2])


# By which class ``named_parameters()`` or ``named_buffers()`` of a part of the network is another.
OVERRIDES: dict[str, tuple[str, type[nn.Module]]] = {
    "hides weights": ("", HidesParameters),
    "renames parameters": ("", RenamesParameters),
    "hides buffers": ("", HidesBuffers),
    "hides a bias of a layer": ("encoder", HidesItsBias),
}


def another_value(buffer: Tensor) -> Tensor:
    """Drawn anew, of its kind: each rank draws its own unless they are seeded alike."""
    if buffer.dtype is torch.bool:
        return torch.rand(buffer.shape) > 0.3
    if not buffer.dtype.is_floating_point:
        return torch.randint(0, 9, buffer.shape, dtype=buffer.dtype)
    return (torch.rand(buffer.shape, dtype=torch.float64) + 0.5).to(buffer.dtype)


def build(spec: NetworkSpec, kind: str, dtype: torch.dtype) -> list[Network]:
    """The networks of a program of this kind."""
    first = Network(spec)
    networks = [first]
    if kind in ("two groups", "ring of pairs"):
        networks += [Network(spec) for _ in range(1 if kind == "two groups" else 2)]
    elif kind == "shared encoder":
        networks.append(Network(spec, encoder=first.encoder))
    for network in networks:
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.BatchNorm1d):
                module.to(dtype)
    return networks
