"""Outputs that hide their tensors, where the first gradient comes inside an inner backward.

No hook of an output tells of the backward then, and the engine announces the gradients of the inner
backward alone: of a reentrant checkpoint, or of a function that runs a backward.
"""

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_mean_of, breaking_off, drawn, fail, wrap

import tritonddp

WIDTH = 4


class Inner(torch.autograd.Function):
    """A layer whose backward runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer, ctx.x = layer, x.detach()
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        x.grad = None
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return None, x.grad


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: reentrant(layer, x.sin()), x, use_reentrant=True)


LAST = {"reentrant": reentrant, "nested": nested, "function": Inner.apply}


class Net(nn.Module):
    """Hides its output, in the way ``hides``."""

    def __init__(self, last: str = "reentrant", hides: str = "object") -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last, self.hides = last, hides

    def forward(self, x: Tensor) -> Any:
        out = LAST[self.last](self.c, self.b(torch.tanh(self.a(x))))
        if self.hides == "object":
            return SimpleNamespace(get=lambda: out)
        if self.hides == "iterator":
            values = iter([out])
            return SimpleNamespace(get=lambda: next(values))
        object.__setattr__(self, "loss", out)  # None is returned
        return None

    def hidden(self, x: Tensor, wrapper: Any) -> Tensor:
        found = wrapper(x)
        return self.loss if found is None else found.get()


def batch(step: int) -> Tensor:
    return drawn(3, WIDTH, step=step)


def step_of(net: Net, wrapper: Any, *steps: int) -> None:
    net.zero_grad()
    torch.stack(
        [net.hidden(batch(step), wrapper).square().sum() for step in steps]
    ).sum().backward()


@pytest.mark.parametrize("hides", ["object", "iterator", "attribute"])
@pytest.mark.parametrize("last", LAST)
@ranks(2, views=True)
def test_the_reduction_ends_with_the_outermost_backward(last: str, hides: str, view: bool) -> None:
    net = Net(last, hides)
    alone = copy.deepcopy(net)
    ddp = wrap(net, view, bucket_cap_mb=1e-4)
    for step in range(4):
        step_of(net, ddp, step)
        step_of(alone, alone, step)
        assert_mean_of(ddp, alone, f"step {step}")
    assert ddp.reducer.counters.reductions == 4


@pytest.mark.parametrize("last", LAST)
@ranks(2)
def test_several_forwards_are_reduced_once(last: str) -> None:
    net = Net(last)
    alone = copy.deepcopy(net)
    ddp = wrap(net, bucket_cap_mb=1e-4)
    for step in range(3):
        with ddp.no_sync():
            step_of(net, ddp, 10 + step)
        kept = [
            param.grad.clone() if param.grad is not None else None for param in net.parameters()
        ]
        step_of(net, ddp, step, 20 + step)
        step_of(alone, alone, step, 20 + step)
        assert_mean_of(ddp, alone, f"step {step}")
        assert kept[0] is not None
    assert ddp.reducer.counters.reductions == 3


@ranks(2)
def test_a_local_backward_before_counts(rank: int) -> None:
    net = Net()
    alone = copy.deepcopy(net)
    ddp = wrap(net, bucket_cap_mb=1e-4)
    for step in range(3):
        for each, wrapper in (net, ddp), (alone, alone):
            each.zero_grad()
            with ddp.no_sync():
                each.hidden(batch(10 + step), wrapper).sum().backward()
            each.hidden(batch(step), wrapper).square().sum().backward()
        assert_mean_of(ddp, alone, f"step {step}")


@ranks(2)
def test_two_wrappers_in_one_backward() -> None:
    nets = [Net(), Net("function")]
    alone = copy.deepcopy(nets)
    ddps = [wrap(net, bucket_cap_mb=1e-4) for net in nets]
    for step in range(3):
        for first, second, wrappers in (*nets, ddps), (*alone, alone):
            first.zero_grad(), second.zero_grad()
            middle = first.hidden(batch(step), wrappers[0])
            second.hidden(middle, wrappers[1]).square().sum().backward()
        for ddp, own in zip(ddps, alone, strict=True):
            assert_mean_of(ddp, own, f"step {step}")


@ranks(2)
def test_a_module_replicated_in_place() -> None:
    net = Net()
    alone = copy.deepcopy(net)
    tritonddp.replicate(net)
    for step in range(3):
        step_of(net, net, step)
        step_of(alone, alone, step)
        assert_mean_of(net, alone, f"step {step}")


@pytest.mark.parametrize("at", ["a", "b"])
@ranks(2)
def test_a_backward_that_fails_behind_the_inner_one(rank: int, at: str) -> None:
    """The graph lives on: nothing tells that the backward around the inner one has failed."""
    net = Net()
    alone = copy.deepcopy(net)
    ddp = wrap(net, bucket_cap_mb=1e-4)
    kept = []
    for step in range(6):
        if step in (2, 4):
            if at == "a":
                with breaking_off(net.a.weight, rank == 1):
                    step_of(net, ddp, step)
            else:  # in the first node behind the checkpoint
                handle = net.b.register_full_backward_hook(fail) if rank else None
                kept.append(net.hidden(batch(step), ddp))
                with pytest.raises(ZeroDivisionError) if rank else contextlib.nullcontext():
                    kept[-1].sum().backward()
                if handle is not None:
                    handle.remove()
            continue
        step_of(net, ddp, step)
        step_of(alone, alone, step)
        assert_mean_of(ddp, alone, f"step {step}")


@ranks(2)
def test_a_whole_backward_in_a_hook_of_another_graph_ends_with_itself() -> None:
    """The hook may step an optimizer after it: its gradients are means."""
    net = Net()
    ddp, other = wrap(net, bucket_cap_mb=1e-4), nn.Linear(WIDTH, 1)
    for step in range(3):
        net.zero_grad()
        hidden, seen = net.hidden(batch(step), ddp), []

        @torch.enable_grad()
        def run(_: Tensor, hidden: Tensor = hidden, seen: list[Tensor] = seen) -> None:
            hidden.square().sum().backward()
            seen += [param.grad.clone() for param in net.a.parameters() if param.grad is not None]

        rest = other(hidden.detach())
        rest.register_hook(run)
        rest.sum().backward()
        assert len(seen) == 2
        assert_same_on_all_ranks(seen)


class Whole(nn.Module):
    """All of its layers are inside one reentrant checkpoint, once or twice."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(WIDTH, WIDTH), times

    def forward(self, x: Tensor) -> Any:
        outputs = [reentrant(self.layer, x * n) for n in range(1, self.times + 1)]
        return SimpleNamespace(get=lambda: torch.stack(outputs).sum(0))


@ranks(2)
def test_layers_that_two_checkpoints_of_a_hidden_forward_share_are_an_error(rank: int) -> None:
    """As under stock, which says that a parameter is marked ready twice."""
    net = Whole(1)
    alone = copy.deepcopy(net)
    ddp = wrap(net)
    for step in range(3):
        for each, wrapper in (net, ddp), (alone, alone):
            each.zero_grad()
            wrapper(batch(step).requires_grad_()).get().square().sum().backward()
        assert_mean_of(ddp, alone, f"step {step}")
    net.times = 2
    with pytest.raises(RuntimeError, match="became ready again after all were averaged"):
        ddp(batch(3).requires_grad_()).get().square().sum().backward()
