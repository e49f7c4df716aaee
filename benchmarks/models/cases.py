"""The models that the benchmarks wrap, and batches for them.

Each stresses another cost of gradient synchronization: very many tiny gradients (host work per
parameter), many large ones (passes over memory), two ordinary networks between these extremes, and
one in which every batch leaves most parameters unused. The well-known architectures are for a GPU:
on a CPU, one of their steps takes seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.models.architectures import ARCHITECTURES, GPT2Small, Llama3Layer

# Inputs of a model, and targets.
Batch = tuple[Any, Tensor]

SIZES = ("small", "large")


class ManyParameters(nn.Module):
    """``count`` vectors of ``size`` elements; the output is a weighted sum of dot products.

    Their gradients become ready one by one, the last parameter first. Each is the input times a
    different factor, so that swapped gradients are detected.
    """

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(size) / size for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        products = torch.stack([(vector * x).sum() for vector in self.vectors])
        return products @ torch.linspace(0.5, 1.5, len(products), device=x.device)


class Branchy(nn.Module):
    """Residual blocks of experts (linear layers); a batch uses a few experts in each block.

    The batch determines which, like the choice of a router: it differs between ranks and steps, and
    is the same for every model that gets the same batch.
    """

    BLOCKS, EXPERTS, CHOSEN, WIDTH = 50, 8, 2, 32  # 400 layers, of which a batch uses 100

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.EXPERTS))
            for _ in range(self.BLOCKS)
        )

    def forward(self, routed: tuple[Tensor, Sequence[Sequence[int]]]) -> Tensor:
        """Return the output. ``routed``: rows of ``WIDTH`` features; experts of each block."""
        x, routes = routed
        for experts, chosen in zip(self.blocks, routes, strict=True):
            x = x + 0.1 * torch.relu(sum(experts[index](x) for index in chosen))
        return x


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        make_model: builds the model in fp32 on the CPU, from torch's global random state.
        make_batch: draws inputs and targets for a number of examples from a CPU generator.
    """

    name: str  # name on the command line
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator, int], Batch]
    examples: tuple[int, int] = (1, 1)  # in a small batch, and in a large one
    unused: bool = False  # every batch leaves other parameters unused

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """Return the model on ``device``; the same seed gives the same parameters."""
        torch.manual_seed(seed)
        return self.make_model().to(device)

    def copies(self, device: torch.device, seed: int = 0) -> Iterator[nn.Module]:
        """Yield copies of :meth:`model`, drawn once: drawing takes seconds for some models."""
        first = self.model(device, seed)
        while True:
            yield copy.deepcopy(first)

    def batch(self, device: torch.device, seed: int, size: str = "small") -> Batch:
        """Return inputs and targets on ``device``; use a different seed on every rank."""
        examples = self.examples[SIZES.index(size)]
        inputs, targets = self.make_batch(torch.Generator().manual_seed(seed), examples)
        return _moved(inputs, device), targets.to(device)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy if targets are classes (int64), otherwise the mean squared error.

    Random targets give every used parameter a nonzero gradient. A plain sum would not: before a
    LayerNorm, its gradients are rounding errors.
    """
    inputs, targets = batch
    outputs = model(inputs)
    if targets.dtype == torch.int64:
        return cross_entropy(outputs.flatten(0, -2), targets.flatten())
    return mse_loss(outputs, targets)


def backward(model: nn.Module, batch: Batch) -> None:
    """Clear the gradients and run forward and backward: a step without the optimizer."""
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()


def _moved(inputs: Any, device: torch.device) -> Any:
    """Return tensors on ``device``. A route stays on the host, which follows it."""
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, tuple):
        return tuple(_moved(each, device) for each in inputs)
    return inputs


def _vectors(size: int) -> Callable[[torch.Generator, int], Batch]:
    def make(generator: torch.Generator, examples: int) -> Batch:
        return torch.randn(size, generator=generator), torch.randn((), generator=generator)

    return make


def _mlp() -> nn.Module:
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers)


def transformer(width: int, heads: int) -> nn.Module:
    # No dropout: the gradients of all configurations are compared.
    layer = nn.TransformerEncoderLayer(
        d_model=width, nhead=heads, dim_feedforward=4 * width, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)


def features(*shape: int) -> Callable[[torch.Generator, int], Batch]:
    """Return a function that draws inputs and targets of one shape."""

    def make(generator: torch.Generator, examples: int) -> Batch:
        sizes = (examples, *shape)
        return torch.randn(sizes, generator=generator), torch.randn(sizes, generator=generator)

    return make


def _images(generator: torch.Generator, examples: int) -> Batch:
    images = torch.randn((examples, 3, 224, 224), generator=generator)
    return images, torch.randint(1000, (examples,), generator=generator)


def _tokens(generator: torch.Generator, examples: int) -> Batch:
    shape = (examples, 1024)
    tokens, targets = torch.randint(GPT2Small.vocabulary, (2, *shape), generator=generator)
    return tokens, targets


def _hidden(generator: torch.Generator, examples: int) -> Batch:
    """Draw sequences of 1,024 tokens, or of 2,048 if there are several examples."""
    return features(2048 if examples > 1 else 1024, Llama3Layer.width)(generator, examples)


def _routed(generator: torch.Generator, examples: int) -> Batch:
    x, targets = features(Branchy.WIDTH)(generator, examples)
    routes = [
        torch.randperm(Branchy.EXPERTS, generator=generator)[: Branchy.CHOSEN].tolist()
        for _ in range(Branchy.BLOCKS)
    ]
    return (x, routes), targets


ON_CPU = (
    Case("many_small", lambda: ManyParameters(1000, 64), _vectors(64)),
    Case("many_large", lambda: ManyParameters(160, 150_000), _vectors(150_000)),
    Case("mlp", _mlp, features(512), (32, 4096)),
    Case("transformer", lambda: transformer(256, heads=4), features(32, 256), (4, 256)),
    Case("branchy", Branchy, _routed, (32, 4096), unused=True),
)

_BATCHES = {
    "resnet50": (_images, (4, 64)),
    "gpt2_small": (_tokens, (1, 8)),
    "llama3_8b_layer": (_hidden, (1, 4)),
}

CASES = {
    case.name: case
    for case in (
        *ON_CPU,
        *(Case(name, make, *_BATCHES[name]) for name, make in ARCHITECTURES.items()),
    )
}


def default_names(device: torch.device) -> list[str]:
    """Return the cases that run in reasonable time: without the architectures on the CPU."""
    return [case.name for case in ON_CPU] if device.type == "cpu" else list(CASES)
