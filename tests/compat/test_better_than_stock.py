"""Programs on which stock DDP fails, or is wrong: the table "Programs" of docs/differences.md."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from torch import Tensor, nn
from torch.func import jacfwd, jacrev, jvp
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint
from training import assert_close, drawn, gradients, means, squares

from tritonddp import DistributedDataParallel


class Answer:
    """What a model returns: an object of the user's own."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.layer(x))


class Adapted(nn.Module):
    """As AdaLoRA: a reentrant checkpoint, and a penalty on the weights in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, self.stem(x), use_reentrant=True)
        weight = self.layer.weight
        return x.square().sum() + (weight @ weight.T - torch.eye(4)).square().sum()


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def jacobians(ddp: nn.Module, x: Tensor) -> Tensor:
    both = jacfwd(ddp)(x).sum() + jacrev(ddp)(x).sum()
    return both + jvp(ddp, (x,), (torch.ones_like(x),))[1].sum()


def converted(model: nn.Module, x: Tensor) -> Tensor:
    model.half()
    model.float()
    return model(x).square().sum()


def reordered(model: nn.Module, x: Tensor) -> Tensor:
    model.to(memory_format=torch.channels_last)
    images = x.reshape(-1, 2, 4, 4).to(memory_format=torch.channels_last)
    return model(images).square().sum()


# For each program: the model, the numbers a rank gives it, and the loss.
Program = tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], Tensor]]
PROGRAMS: dict[str, Program] = {
    "torch.func": (lambda: net(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), (3, 4), jacobians),
    "own objects": (Answers, (3, 4), lambda model, x: squares(model(x).logits)),
    "penalty": (Adapted, (3, 4), lambda model, x: model(x)),
    "half and back": (lambda: net(nn.Linear(4, 4), nn.Linear(4, 2)), (3, 4), converted),
    "channels_last": (lambda: net(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 2)), (3, 32), reordered),
}


# Right under stock without find_unused_parameters, which finds no tensor in such outputs.
RIGHT_WITHOUT_THE_FLAG = {"own objects"}


def is_right(wrapped: Any, name: str, flags: dict[str, Any]) -> bool:
    """Whether three steps gave the mean of what each rank's own model computes."""
    make, shape, loss = PROGRAMS[name]
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    ddp = wrapped(model, **flags)
    for step in range(3):
        for each in (ddp, alone):
            each.zero_grad()
            x = drawn(*shape, step=step).requires_grad_(name == "penalty")
            loss(each, x).backward()
        try:
            assert_close(gradients(ddp), means(gradients(alone)))
        except AssertionError:
            return False
    return True


@pytest.mark.parametrize("name", PROGRAMS)
@ranks(2)
def test_it_is_right_here_and_not_under_stock(name: str) -> None:
    assert is_right(DistributedDataParallel, name, {})
    for flag in (False, True):
        try:
            right = is_right(Stock, name, {"find_unused_parameters": flag})
        except RuntimeError:
            right = False
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, right)
        assert all(found) is (name in RIGHT_WITHOUT_THE_FLAG and not flag), flag
