"""Held-out loss of training with gradients on each wire, beside that of training in fp32.

    torchrun --standalone --nproc-per-node 2 benchmarks/convergence/convergence.py [--out FILE]

All wire formats of a seed train together in one process group, with the same initial parameters,
batches and schedule, so that only the wire format differs. The task is designed to need error
feedback, see :class:`Opposed`. After every step, all parameters are compared bitwise between the
ranks; the first difference ends the run with an error. Runs on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version
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

# Constructor arguments by name. All others are compared with the first. The process group is used
# because ranks of one host would exchange through memory, and sent bytes are counted.
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"transport": "process_group"},
    "bf16": {"reduce_dtype": torch.bfloat16, "transport": "process_group"},
    "int8": {"compression": "int8"},
    "int8 without feedback": {"compression": Int8(error_feedback=False)},
}
NAME, STEPS, LR, MOMENTUM = "opposed", 600, 0.05, 0.9


class Opposed(nn.Sequential):
    """N x 1 x 8 x 8 pixels to N x 10 logits.

    Ranks with an even number add a fixed gradient to each gradient, and the next rank subtracts it:
    ``PULL`` times a normal variable in each element. It cancels in the mean over the ranks, so in
    fp32 it changes nothing. But the values that a rank sends are thousands of times larger than the
    useful gradient, and the rounding error is relative to the sent values. This is the textbook
    case against compression without feedback: Beznosikov et al., On Biased Compression for
    Distributed Learning, 2020.
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
    """Training with one wire format from one seed.

    Attributes:
        sent_bytes: bytes sent by a rank in the last step, see
            :class:`tritonddp.coordination.counters.Counters`.
    """

    ddp: Any
    optimizer: Any
    schedule: Any
    loss: float = 0.0  # final loss on held-out data, in nats per target
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
            "same_bits_after_steps": steps * len(options.seeds),  # otherwise the run has ended
            "sent_bytes": {wire: by_seed[0][wire].sent_bytes for wire in WIRES},
            "comparisons": compared(losses),
            "losses": losses,  # by wire and seed
        }
        output.write({"tasks": {NAME: found}})
        output.say(*text(tables.convergence(output.only("tasks", NAME))))
        output.end()


def compared(finals: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Compare the final losses of all wires, by seed, with the losses of the first wire.

    Returns:
        For each wire: ``mean``, ``low`` and ``high`` of its final losses over the seeds, the
        ``differences`` from the first wire with the same seed, and the ``verdict``: whether the
        mean is ``"within"`` the range of the first wire's losses over all seeds, ``"below"`` it or
        ``"above"`` it. A NaN mean counts as above.
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
    """Train all wires together.

    Raises:
        RuntimeError: after a step, a parameter differs between ranks.
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
