"""What convergence.py trains: the example's two tasks, and one in which error feedback decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from tasks import Task, digits, text
from torch import nn
from torch.optim import SGD, AdamW, Optimizer


@dataclass(frozen=True)
class Training:
    """A task and how it is trained.

    Attributes:
        make_task: with the steps, the batch size (per rank) and the peak of the learning rate.
        make_optimizer: of parameters and ``lr``.
        optimizer: the same in words.
        evaluations: how often the held-out loss is taken, the last time at the end.
    """

    make_task: Callable[[], Task]
    make_optimizer: Callable[..., Optimizer]
    optimizer: str
    evaluations: int


def short_text() -> Task:
    """The example's text for 1,000 steps. Batches are a quarter of the example's, and so is what
    is held out (32,000 characters): with all of it the benchmark would take an hour."""
    task = text()
    return replace(
        task,
        steps=1000,
        batch_size=4,
        held_out_inputs=task.held_out_inputs[::4],
        held_out_targets=task.held_out_targets[::4],
    )


def opposed() -> Task:
    """The example's digits for a small perceptron, on ranks whose gradients nearly cancel."""
    return replace(digits(), name="opposed", make_model=Opposed, steps=600, lr=0.05)


class Opposed(nn.Sequential):
    """N x 1 x 8 x 8 pixels to N x 10 logits.

    To each gradient a rank with an even number adds a fixed one, which the next rank subtracts:
    ``PULL`` times a normal variable in each element. In the mean over the ranks it is gone, and
    nothing is different in fp32; but what a rank sends is thousands of times what counts of it,
    and rounding is relative to what is sent. (That is the textbook case against compression
    without feedback: Beznosikov et al., On Biased Compression for Distributed Learning, 2020.)
    """

    PULL = 30.0

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        rank, paired = dist.get_rank(), dist.get_world_size() // 2 * 2
        sign = 0 if rank >= paired else (1, -1)[rank % 2]
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            pull = sign * self.PULL * torch.randn(parameter.shape, generator=generator)
            parameter.register_hook(partial(torch.add, pull))


TRAININGS = {
    "text": Training(short_text, AdamW, "AdamW", evaluations=10),
    "digits": Training(digits, AdamW, "AdamW", evaluations=20),
    "opposed": Training(opposed, partial(SGD, momentum=0.9), "SGD with momentum", evaluations=20),
}
