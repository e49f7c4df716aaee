"""Held-out loss of training with gradients on each wire, beside that of training in fp32.

    torchrun --standalone --nproc-per-node 2 benchmarks/convergence/convergence.py [--out FILE]

All wires of a seed train side by side in one process group: with the same start, batches and
schedule, so that they differ by the wire alone. The task is made for error feedback, see
:class:`Opposed`. After every step all parameters are compared between the ranks, bit for bit; the
first that differs ends the run with an error. On the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import torch
import torch.distributed as dist
from tasks import Task, digits
from torch import nn
from train import batch_loss, evaluate, first_difference, progress, shards, warmup_and_cosine

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.report import tables
from benchmarks.report.table import text
from tritonddp import DistributedDataParallel, Int8

# By name, what the constructor is given. The others are compared with the first. (Ranks of one host
# would send nothing through memory, and what is sent is counted.)
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"transport": "process_group"},
    "bf16": {"reduce_dtype": torch.bfloat16, "transport": "process_group"},
    "int8": {"compression": "int8"},
    "int8 without feedback": {"compression": Int8(error_feedback=False)},
}
NAME, STEPS, LR, MOMENTUM = "opposed", 600, 0.05, 0.9


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


@dataclass
class Contender:
    """What one wire makes of one seed.

    Attributes:
        sent_bytes: of a rank in the last step, see
            :class:`tritonddp.coordination.counters.Counters`.
    """

    ddp: Any
    optimizer: Any
    schedule: Any
    loss: float = 0.0  # on the held-out data, in nats per target, at the end
    sent_bytes: int = 0

    @classmethod
    def of(cls, wire: str, seed: int, steps: int) -> Contender:
        torch.manual_seed(seed)
        ddp = DistributedDataParallel(Opposed(), **WIRES[wire])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=MOMENTUM)
        return cls(ddp, optimizer, warmup_and_cosine(optimizer, steps))


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=command.positive, default=STEPS)
    options = parser.parse_args()
    steps, task = options.steps, digits()
    with process_group("gloo") as ranks:
        more = {"world_size": ranks.world_size, "backend": ranks.backend, "seeds": options.seeds}
        output = Output("convergence", options.out, ranks.rank == 0, **more)
        by_seed = [train(task, seed, steps, ranks) for seed in options.seeds]
        losses = {wire: [seed[wire].loss for seed in by_seed] for wire in WIRES}
        found = {
            "target": task.target,
            "parameters": sum(each.numel() for each in Opposed().parameters()),
            "steps": steps,
            "batch_size": task.batch_size,
            "optimizer": f"SGD with momentum, {LR:g}",
            "held_out_targets": task.held_out_targets.numel(),
            "same_bits_after_steps": steps * len(options.seeds),  # of each wire; else it has ended
            "sent_bytes": {wire: by_seed[0][wire].sent_bytes for wire in WIRES},
            "comparisons": compared(losses),
            "losses": losses,  # wire, seed
        }
        output.write({"tasks": {NAME: found}})
        output.say(*text(tables.convergence(output.only("tasks", NAME))))
        output.end()


def compared(finals: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Final losses of all wires, by seed, against those of the first wire.

    Returns:
        By wire the final losses' ``mean``, ``low`` and ``high`` over the seeds, their
        ``differences`` from the first wire's with the same seed, and the ``verdict``: whether the
        mean lies ``"within"`` the first wire's losses of all seeds, ``"below"`` or ``"above"``
        them. A mean that is no number is above.
    """
    first, reference = next(iter(finals.items()))

    def verdict(value: float) -> str:
        if value < min(reference):
            return "below"
        return "within" if value <= max(reference) else "above"

    return {
        wire: {
            "mean": mean(each),
            "low": min(each),
            "high": max(each),
            "differences": [a - b for a, b in zip(each, reference, strict=True)],
            "verdict": None if wire == first else verdict(mean(each)),
        }
        for wire, each in finals.items()
    }


def train(task: Task, seed: int, steps: int, ranks: Ranks) -> dict[str, Contender]:
    """Train all wires side by side.

    Raises:
        RuntimeError: after some step a parameter is not the same on all ranks.
    """
    contenders = {wire: Contender.of(wire, seed, steps) for wire in WIRES}
    batches = shards(len(task.inputs), task.batch_size, ranks.rank, ranks.world_size, seed)
    for step in progress(steps, f"{NAME}, seed {seed}, {len(WIRES)} wires"):
        indices = next(batches)
        for each in contenders.values():
            counters = each.ddp.reducer.counters
            sent_before = counters.sent_bytes
            logits = each.ddp.train()(task.inputs[indices])
            batch_loss(logits, task.targets[indices]).backward()
            each.sent_bytes = counters.sent_bytes - sent_before
            each.optimizer.step()
            each.optimizer.zero_grad()
            each.schedule.step()
        difference = first_difference(
            (f"{wire}: {name}", parameter)
            for wire, each in contenders.items()
            for name, parameter in each.ddp.module.named_parameters()
        )
        if difference:
            raise RuntimeError(
                f"seed {seed}: after step {step + 1} the ranks do not hold the same bits of "
                f"{difference}"
            )
    for each in contenders.values():
        each.loss = evaluate(task, each.ddp, ranks.device)[0]
    return contenders


if __name__ == "__main__":
    main()
