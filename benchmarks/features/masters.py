"""Held-out loss of training in fp32, in bf16, and in bf16 with fp32 copies of the parameters.

    torchrun --standalone --nproc-per-node 2 benchmarks/features/masters.py [--steps N] [--out FILE]

A perceptron learns the digits of the example by the sharded AdamW, at a learning rate at which most
steps are less than half of the last bit of a parameter in bf16. The three train side by side, with
the same start and batches. With the copies gradients are fp32 (``Tensor.grad_dtype``). On the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import torch
from tasks import Task, digits
from torch import Tensor, nn
from train import batch_loss, evaluate, shards

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.ranks import process_group
from benchmarks.report.table import Table, number, text
from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer

WIDTH, LR, BATCH, STEPS, EVALUATIONS = 256, 1e-4, 32, 2000, 40
# By name: dtype of the parameters, and whether their owners keep fp32 copies.
WAYS = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16, fp32 copies": (torch.bfloat16, True),
}


class Net(nn.Sequential):
    """N x 1 x 8 x 8 pixels to N x 10 logits in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(64, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 10),
        )
        self.to(dtype)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(self[-1].weight.dtype)).float()


class Training:
    """Of one way."""

    def __init__(self, task: Task, dtype: torch.dtype, has_copies: bool) -> None:
        torch.manual_seed(0)
        net = Net(dtype)
        if has_copies:
            for param in net.parameters():
                param.grad_dtype = torch.float32
        self.task, self.ddp = task, DistributedDataParallel(net)
        self.optimizer = ZeroRedundancyOptimizer(
            self.ddp.parameters(), torch.optim.AdamW, master_weights=has_copies, lr=LR
        )
        self.losses: list[float] = []

    def step(self, indices: Tensor) -> None:
        logits = self.ddp.train()(self.task.inputs[indices])
        batch_loss(logits, self.task.targets[indices]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.losses.append(evaluate(self.task, self.ddp, torch.device("cpu"))[0])


def main() -> None:
    arguments = command.parser(__doc__)
    arguments.add_argument("--steps", type=command.positive, default=STEPS)
    options = arguments.parse_args()
    with process_group("gloo") as ranks:
        more = {"world_size": ranks.world_size, "backend": ranks.backend}
        output = Output("masters", options.out, ranks.rank == 0, **more)
        task = digits()
        trainings = {name: Training(task, *way) for name, way in WAYS.items()}
        batches = shards(len(task.inputs), BATCH, ranks.rank, ranks.world_size, seed=0)
        at = sorted({options.steps * part // EVALUATIONS for part in range(EVALUATIONS + 1)})
        for step in range(options.steps + 1):
            indices = next(batches)
            for each in trainings.values():
                if step in at:
                    each.evaluate()
                each.step(indices)
        losses = {name: each.losses for name, each in trainings.items()}
        output.write({"optimizer": f"AdamW, {LR:g}", "evaluated_after": at, "losses": losses})
        rows = [(name, *(number(found[i]) for i in (0, -1))) for name, found in losses.items()]
        heading = ("held-out loss, nats per digit", "at the start", f"after {options.steps} steps")
        output.say(*text([Table(heading, rows)]))
        output.end()


if __name__ == "__main__":
    main()
