"""When gradients become ready: in the reverse order of registration, as layers are multiplied."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Gradients:
    """Of a model, in the order of its backward.

    Attributes:
        sizes: bytes of each, in fp32.
        ready: when it is there, as a share of the backward.
    """

    sizes: list[int]
    ready: list[float]

    @classmethod
    def of(cls, name: str, make: Callable[[], nn.Module]) -> Gradients:
        """Of the model that ``make`` builds; nothing of its size is allocated."""
        with torch.device("meta"):
            model = make()
            costs = _costs(model, name)
        sizes = [4 * param.numel() for param in model.parameters()]
        # The head of GPT-2 has no parameter of its own.
        passed = [*itertools.accumulate(costs[::-1])]
        ready = [each / passed[-1] for each in passed[-len(sizes) :]]
        return cls(sizes[::-1], ready)


def _costs(model: nn.Module, name: str) -> list[float]:
    """Multiplications for the gradients of each parameter, in the order of registration.

    All layers but ResNet's multiply each of their elements equally often.
    """
    params = list(model.parameters())
    if name == "gpt2_small":  # whose embeddings are looked up; the head multiplies by the first
        return [0.0, 0.0, *(float(param.numel()) for param in params[2:]), params[0].numel()]
    positions: dict[Tensor, int] = {}
    if name == "resnet50":
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(
                    lambda layer, _, output: positions.update({layer.weight: output[0, 0].numel()})
                )
        model(torch.empty(2, 3, 224, 224))
    return [float(param.numel()) * positions.get(param, 1) for param in params]
