"""Programs of people who know nothing of this package: right under stock, hard on a clever one.

Written by hand, since no generator draws them: what ``tests/differential`` can draw is drawn there
(``--kind hostile``).
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential.networks import Centered
from distributed import assert_same_bits, give_up_after, in_rings, ranks, run_ranks
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint
from training import drawn, gradients

from tritonddp import DistributedDataParallel

# A rank's parameters, gradients and buffers in each step.
Seen = list[list[Tensor | None]]


def train(
    ddp: nn.Module, *size: int, arguments_of: Callable[[int], dict[str, Any]] = lambda step: {}
) -> Seen:
    """Some steps on inputs of this rank, of ``size``; ``arguments_of`` a step of its call."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    seen: Seen = []
    for step in range(12):
        optimizer.zero_grad()
        ddp(drawn(*size, step=step), **arguments_of(step)).pow(2).mean().backward()
        kept = [each.detach().clone() for each in (*ddp.parameters(), *ddp.buffers())]
        seen.append([*kept, *gradients(ddp)])
        optimizer.step()
    return seen


# Modules that make collectives of their own in the backward, in the group of the buckets.


def wrapped_small(kind: Any, net: nn.Module, **options: Any) -> nn.Module:
    """With small buckets, through the process group."""
    wrap = kind if kind is Stock else in_rings
    return wrap(net, bucket_cap_mb=4300 / 2**20, **options)


class Block(nn.Module):
    """A layer, a collective, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.behind(Centered.apply(self.before(x)))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32, bias=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor, uses_head: bool) -> Tensor:
        x = self.blocks(self.stem(x))
        return Centered.apply(self.head(x) if uses_head else x[:, :2])


def a_collective_before_the_first_gradient(kind: Any) -> Seen:
    """A rank leaves the head out: its bucket, the first one, leaves behind the first collective.

    Stock: a parameter that is unused counts as there from the first gradient on.
    """
    is_first = dist.get_rank() == 0
    ddp = wrapped_small(kind, Headed(), find_unused_parameters=True)
    return train(ddp, 8, 16, arguments_of=lambda step: {"uses_head": is_first or step % 3 == 0})


class LikeABucket(torch.autograd.Function):
    """Sums as many elements in the backward as a bucket has, most of them zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean = torch.zeros(ctx.size)
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


def unused_from_a_later_step_on(kind: Any) -> Seen:
    """Beside a collective of as many elements as a bucket, which would go unnoticed in its place.

    Stock: right with its flag.
    """
    is_first = dist.get_rank() == 0
    ddp = wrapped_small(kind, Scaled(), find_unused_parameters=True)
    return train(ddp, 8, 16, arguments_of=lambda step: {"is_scaled": is_first or step < 4})


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


def reentrant_checkpoints_from_a_later_step_on(kind: Any) -> Seen:
    """Every parameter is used. Stock: right without its flag."""
    ddp = wrapped_small(kind, Checkpointed())
    return train(ddp, 8, 16, arguments_of=lambda step: {"recomputes": step >= 5})


# Others.

WAYS: list[Callable[[nn.Module], nn.Module]] = [
    torch.fx.symbolic_trace,
    lambda net: nn.Sequential(nn.Linear(64, 64), torch.jit.script(net)),
    lambda net: torch.jit.trace(net, torch.randn(4, 64), check_trace=False),
    torch.jit.script,
]


def scripted_modules(kind: Any) -> Seen:
    """Modules that torch.fx or torch.jit has traced, with a scripted part, or scripted.

    Stock: as any other module. With BatchNorm, whose buffers TorchScript keeps.
    """
    seen: Seen = []
    for convert in WAYS:
        plain = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            seen += train(kind(convert(plain)), 8, 64)
    return seen


def rewrapped_with_views(kind: Any) -> Seen:
    """A net with gradients as views is wrapped anew, in another module.

    The old wrapper lies in a reference cycle: a trainer holds it and is held by it. Stock: works.
    """
    net, seen = nn.Linear(16, 16), []
    for phase in range(3):
        task = nn.Sequential(net, nn.Linear(16, 2 + phase))
        ddp = kind(task, gradient_as_bucket_view=True)
        ddp.trainer = [ddp]
        seen += train(ddp, 8, 16)
    return seen


PROGRAMS = [
    pytest.param(a_collective_before_the_first_gradient, marks=pytest.mark.quick),
    unused_from_a_later_step_on,
    reentrant_checkpoints_from_a_later_step_on,
    pytest.param(scripted_modules, marks=pytest.mark.quick),
    rewrapped_with_views,
]


@pytest.mark.parametrize("program", PROGRAMS)
@ranks(2)
def test_a_program_sees_what_it_sees_under_stock(program: Callable[[Any], Seen]) -> None:
    seen = []
    for kind in (Stock, DistributedDataParallel):
        torch.manual_seed(0)
        seen.append(program(kind))
    assert_same_bits(*reversed(seen), "in step")


def waits_in_a_callback(kind: Any, first: int) -> None:
    """From this step on rank 1 waits, in a callback at the end of its backward, for what rank 0
    sends behind its own.
    """
    rank, others = dist.get_rank(), dist.new_group()
    ddp = kind(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))

    def wait_in_the_end(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(exchange_with_rank_0)

    def exchange_with_rank_0() -> None:
        dist.send(torch.ones(1), dst=0, group=others)
        dist.recv(torch.empty(1), src=0, group=others)

    for step in range(first + 3):
        waits = step >= first
        out = ddp(drawn(8, 256, step=step))
        if rank == 1 and waits:
            out.register_hook(wait_in_the_end)
        elif rank == 0 and waits:
            # Rank 1 is in its callback before this backward begins. Were it the last of all ranks,
            # it could take part in the whole exchange before its callback.
            dist.recv(torch.empty(1), src=1, group=others)
            if kind is not Stock:
                give_up_after(4, dist.group.WORLD)
        out.pow(2).mean().backward()
        if rank == 0 and waits:
            dist.send(torch.ones(1), dst=1, group=others)


@pytest.mark.parametrize(("size", "first"), [(2, 0), (4, 3)], ids=["", "in shares"])
def test_a_callback_that_waits_for_what_comes_behind_the_backward_is_an_error_of_that_rank(
    size: int, first: int
) -> None:
    """Stock: works, since its buckets have been launched by then."""
    run_ranks(waits_in_a_callback, size, Stock, first)
    named = r"Error: rank [023], (?s:.{,600})\brank 1\b"  # of whichever is the first to say so
    with pytest.raises(pytest.fail.Exception, match=named):
        run_ranks(waits_in_a_callback, size, DistributedDataParallel, first)
