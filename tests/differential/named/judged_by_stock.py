"""Programs that stock DDP plays correctly and that are hard on a wrapper: stock is the judge.

No generator draws them: what ``--kind hostile`` can draw is drawn there. In the first ones modules
make collectives of their own in the backward, in the group of the buckets.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import descend

from differential.named.models import Centered
from differential.named.table import program


def train(net: Any, *arguments: Any, width: int = 16) -> None:
    net.zero_grad()
    dtype = next(net.parameters()).dtype
    net(torch.randn(8, width, dtype=dtype), *arguments).pow(2).mean().backward()
    descend(net, 0.05)


class Block(nn.Module):
    """A layer, a collective, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(Centered.apply(self.before(x)))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32, bias=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor, uses_head: bool) -> Tensor:
        x = self.blocks(self.stem(x))
        return Centered.apply(self.head(x) if uses_head else x[:, :2])


SMALL = 8600 / 2**20  # MiB: a layer of 32 x 32 in fp64
finds = {"bucket_cap_mb": SMALL, "find_unused_parameters": True}


@program(model=Headed, steps=8, **finds)
def collective_before_the_first_gradient(net: Any, rank: int, step: int) -> None:
    """A rank leaves the head out: its bucket, the first one, leaves after the first collective.

    Stock: an unused parameter counts as ready from the first gradient on.
    """
    train(net, rank == 0 or step % 3 == 0)


class LikeABucket(torch.autograd.Function):
    """Sums as many elements in the backward as a bucket has, most of them zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean = gradient.new_zeros(ctx.size)
        mean[: gradient.shape[1]] = gradient.mean(0)
        dist.all_reduce(mean)
        return gradient - mean[: gradient.shape[1]] / dist.get_world_size(), None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor, is_scaled: bool) -> Tensor:
        x = self.second(LikeABucket.apply(self.first(x), 1120))
        return x * self.scale if is_scaled else x


@program(model=Scaled, steps=8, **finds)
def unused_from_a_later_step_on(net: Any, rank: int, step: int) -> None:
    """Together with a collective of as many elements as a bucket has."""
    train(net, rank == 0 or step < 4)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, recomputes: bool) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=True) if recomputes else layer(x)
            x = Centered.apply(x + y.tanh())
        return x


@program(model=Checkpointed, steps=8, bucket_cap_mb=SMALL)
def reentrant_checkpoints_from_a_later_step_on(net: Any, rank: int, step: int) -> None:
    train(net, step >= 5)


def converted(convert: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        plain = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            return convert(plain)

    return make


def train_converted(net: Any, rank: int, step: int) -> None:
    train(net, width=64)


# With BatchNorm, whose buffers TorchScript keeps.
for name, convert in {
    "traced_by_fx": torch.fx.symbolic_trace,
    "with_a_scripted_part": lambda net: nn.Sequential(nn.Linear(64, 64), torch.jit.script(net)),
    "traced": lambda net: torch.jit.trace(net, torch.randn(4, 64), check_trace=False),
    "scripted": torch.jit.script,
}.items():
    program(model=converted(convert), name=name, makes_cycles=True)(train_converted)


@program(model=lambda: nn.Linear(16, 16), reductions=0, makes_cycles=True)
def wrapped_anew_with_views(net: Any, rank: int, step: int) -> None:
    """In another module; the old wrapper is in a reference cycle with its trainer."""
    task = nn.Sequential(net.module, nn.Linear(16, 2 + step).double())
    ddp = type(net)(task, gradient_as_bucket_view=True)
    ddp.trainer = [ddp]
    for _ in range(3):
        train(ddp)
