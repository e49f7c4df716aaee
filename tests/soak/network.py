"""What the ranks of a soak train, and on what."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from soak.plan import BLOCKS

WIDTH = 32  # the smallest whose weights are quantised
_BATCH = 4


class Struck(Exception):
    """A backward that fails, as a user's may."""


class Network(nn.Module):
    """Blocks, of which each forward uses some, and buffers that its outputs depend on."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1, dtype=dtype)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, blocks: tuple[int, ...], fails: bool = False) -> Tensor:
        x = x - self.mean
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.count += 1
        for number in blocks:
            x = x + torch.tanh(self.blocks[number](x))
            if fails and number == 0:
                x.register_hook(_strike)  # the gradients of later blocks have come by then
        return self.head(x) / 8


def _strike(_: Tensor) -> NoReturn:
    raise Struck


class Data:
    """The batches of a soak: by step, microbatch and rank.

    Args:
        seed: of the soak.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = torch.Generator()

    def batch(self, step: int, micro: int, rank: int, dtype: torch.dtype) -> Tensor:
        """``(4, 32)``. Microbatch -1 is that of an evaluation."""
        self._generator.manual_seed(((self._seed * 1_000_003 + step) * 16 + micro + 1) * 16 + rank)
        return torch.randn(_BATCH, WIDTH, generator=self._generator, dtype=dtype)


def loss_of(output: Tensor, batch: Tensor, reduction: str) -> Tensor:
    """How far the outputs are from what can be learned of the batch."""
    errors = (output - batch.sin().sum(1, keepdim=True) / WIDTH).square()
    return errors.mean() if reduction == "mean" else errors.sum() / _BATCH


def optimizer_of(network: nn.Module) -> torch.optim.SGD:
    """With momentum and decay, for which a gradient of zero is not the same as none."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.5, weight_decay=0.01)
    for param in network.parameters():
        # What torch would start with, but there from the beginning, so that tensors can be counted.
        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    return optimizer


def toggle(network: Network, block: int) -> None:
    """Freeze a block, or unfreeze it."""
    weight = network.blocks[block].weight
    network.blocks[block].requires_grad_(not weight.requires_grad)


def replace(network: Network, optimizer: torch.optim.Optimizer, block: int) -> None:
    """Put other parameters into the place of a block's, of equal values."""
    layer = network.blocks[block]
    for name, old in list(layer.named_parameters()):
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        setattr(layer, name, new)
        params = optimizer.param_groups[0]["params"]
        params[next(number for number, each in enumerate(params) if each is old)] = new
        optimizer.state[new] = optimizer.state.pop(old)
