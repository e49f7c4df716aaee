"""The models that the benchmarks wrap, and batches for them.

Each stresses another cost of gradient synchronisation: very many tiny gradients (host work per
parameter), many large ones (passes over memory), and two ordinary networks between the extremes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

Batch = tuple[Tensor, Tensor]


class ManyParameters(nn.Module):
    """``count`` vectors of ``size`` elements; the output is a weighted sum of dot products.

    Their gradients become ready one by one, last parameter first. Each is a multiple of the
    input by a factor of its own, so that one gradient in the place of another is noticed.
    """

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(size) / size for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        products = torch.stack([(vector * x).sum() for vector in self.vectors])
        return products @ torch.linspace(0.5, 1.5, len(products), device=x.device)


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        name: what the command line calls it.
        make_model: builds the model in fp32 on the CPU, from torch's global random state.
        make_batch: draws inputs and targets from a CPU generator.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """The model on ``device``, with the same parameters for the same seed."""
        torch.manual_seed(seed)
        return self.make_model().to(device)

    def batch(self, device: torch.device, seed: int) -> Batch:
        """Inputs and targets on ``device``; give every rank a seed of its own."""
        inputs, targets = self.make_batch(torch.Generator().manual_seed(seed))
        return inputs.to(device), targets.to(device)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error: random targets give every parameter a gradient that is not zero.

    (A plain sum would not: behind a LayerNorm its gradients are rounding errors.)
    """
    inputs, targets = batch
    return mse_loss(model(inputs), targets)


def _vectors(size: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        return torch.randn(size, generator=generator), torch.randn((), generator=generator)

    return make


def _mlp() -> nn.Module:
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers)


def _mlp_batch(generator: torch.Generator) -> Batch:
    return torch.randn(32, 512, generator=generator), torch.randn(32, 512, generator=generator)


def _transformer() -> nn.Module:
    # No dropout: the gradients of all configurations are compared with each other.
    layer = nn.TransformerEncoderLayer(
        d_model=256, nhead=4, dim_feedforward=1024, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)


def _transformer_batch(generator: torch.Generator) -> Batch:
    shape = (4, 32, 256)  # sequences, tokens, features
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


CASES = {
    case.name: case
    for case in (
        Case("many_small", lambda: ManyParameters(1000, 64), _vectors(64)),
        Case("many_large", lambda: ManyParameters(160, 150_000), _vectors(150_000)),
        Case("mlp", _mlp, _mlp_batch),
        Case("transformer", _transformer, _transformer_batch),
    )
}
