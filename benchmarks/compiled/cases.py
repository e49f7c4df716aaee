"""Models for the benchmarks of torch.compile: those of :mod:`models`, and two that are common."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.models import cases as models
from benchmarks.models.cases import Batch, Case


class Network(nn.Module):
    """Other modules, behind a ``forward`` that is not torch's own.

    Where the wrapped module is one of ``torch.nn``, a Sequential for example, stock's compiles
    nothing at all: dynamo skips frames of torch, and inlines them only into those of users.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)


class TiedTransformer(nn.Module):
    """Token embedding, transformer, and an output layer with the embedding's weight."""

    VOCABULARY, WIDTH, LENGTH = 2048, 256, 64

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(self.LENGTH, self.WIDTH))
        layer = nn.TransformerEncoderLayer(
            self.WIDTH, nhead=4, dim_feedforward=1024, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Of int64 ``(examples, LENGTH)``; logits ``(examples, LENGTH, VOCABULARY)``."""
        return self.head(self.layers(self.tokens(tokens) + self.places))


def _tokens(generator: torch.Generator, examples: int) -> Batch:
    shape = (2, examples, TiedTransformer.LENGTH)
    tokens, targets = torch.randint(TiedTransformer.VOCABULARY, shape, generator=generator)
    return tokens, targets


def _conv_net() -> nn.Module:
    widths = (3, 32, 64, 128, 256)
    layers: list[nn.Module] = []
    for below, above in itertools.pairwise(widths):
        for width in (below, above):
            conv = nn.Conv2d(width, above, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(above), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def _images(generator: torch.Generator, examples: int) -> Batch:
    images = torch.randn((examples, 3, 32, 32), generator=generator)
    return images, torch.randint(10, (examples,), generator=generator)


def _behind_network(case: Case) -> Case:
    return replace(case, make_model=lambda: Network(case.make_model()))


CASES = {
    **{name: _behind_network(case) for name, case in models.CASES.items() if not case.unused},
    "tied_transformer": Case("tied_transformer", TiedTransformer, _tokens, (4, 128)),
    "conv_net": Case("conv_net", lambda: Network(_conv_net()), _images, (8, 512)),
    # Inductor makes gradients of convolutions in this layout, whatever that of the parameters is.
    "conv_net_channels_last": Case(
        "conv_net_channels_last",
        lambda: Network(_conv_net()).to(memory_format=torch.channels_last),
        _images,
        (8, 512),
    ),
}
