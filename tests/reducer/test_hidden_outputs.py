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
from distributed import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_mean_of, drawn, wrap

WIDTH = 4


def reentrant(layer: Any, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


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
