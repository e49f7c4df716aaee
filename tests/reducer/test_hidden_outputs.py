"""Outputs that hide their tensors, where the first gradient is ready in an inner backward.

Then no hook of an output notices the backward, and the engine announces only the gradients of the
inner backward: of a reentrant checkpoint, or of a function that runs a backward.
``differential/short`` asks the usual programs of such a module (``hidden``, ``function``).
"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_mean_of, drawn, wrap

WIDTH = 4


def reentrant(layer: Any, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


class Net(nn.Module):
    """Its last layer is in a reentrant checkpoint, inside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        hidden = self.b(torch.tanh(self.a(x)))
        outputs = iter([reentrant(lambda h: reentrant(self.c, h.sin()), hidden)])
        return SimpleNamespace(get=lambda: next(outputs))


class Whole(nn.Module):
    """Its layer is inside one reentrant checkpoint, once or twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(WIDTH, WIDTH), 1

    def forward(self, x: Tensor) -> Any:
        outputs = [reentrant(self.layer, x * n) for n in range(1, self.times + 1)]
        return SimpleNamespace(get=lambda: torch.stack(outputs).sum(0))


def batch(step: int) -> Tensor:
    return drawn(3, WIDTH, step=step)


@ranks(2, views=True)
def test_nested_checkpoints_of_two_wrappers_are_reduced_once(view: bool) -> None:
    nets = [Net(), Net()]
    alone = copy.deepcopy(nets)
    ddps = [wrap(net, view, bucket_cap_mb=1e-4) for net in nets]
    for step in range(3):
        for first, second in (ddps, alone):
            first.zero_grad()
            second.zero_grad()
            second(first(batch(step)).get()).get().square().sum().backward()
        for ddp, own in zip(ddps, alone, strict=True):
            assert_mean_of(ddp, own, f"step {step}")
            assert ddp.reducer.counters.reductions == step + 1


@ranks(2)
def test_a_backward_in_a_hook_of_another_graph_is_reduced_at_its_end() -> None:
    """The hook may step an optimizer after it: its gradients are means."""
    net, other = Net(), nn.Linear(WIDTH, 1)
    ddp = wrap(net, bucket_cap_mb=1e-4)
    for step in range(3):
        net.zero_grad()
        hidden, seen = ddp(batch(step)).get(), []

        @torch.enable_grad()
        def run(_: Tensor, hidden: Tensor = hidden, seen: list[Tensor] = seen) -> None:
            hidden.square().sum().backward()
            seen += [param.grad.clone() for param in net.a.parameters() if param.grad is not None]

        rest = other(hidden.detach())
        rest.register_hook(run)
        rest.sum().backward()
        assert len(seen) == 2
        assert_same_on_all_ranks(seen)


@ranks(2)
def test_a_layer_in_two_checkpoints_of_a_hidden_forward_is_an_error() -> None:
    """As under stock, where a parameter is marked ready twice."""
    net = Whole()
    alone = copy.deepcopy(net)
    ddp = wrap(net)
    for step in range(3):
        for each in ddp, alone:
            each.zero_grad()
            each(batch(step).requires_grad_()).get().square().sum().backward()
        assert_mean_of(ddp, alone, f"step {step}")
    net.times = 2
    with pytest.raises(RuntimeError, match="became ready again after all gradients were averaged"):
        ddp(batch(3).requires_grad_()).get().square().sum().backward()
