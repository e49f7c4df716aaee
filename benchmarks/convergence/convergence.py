"""Held-out loss of training with gradients on each wire, beside that of training in fp32.

    torchrun --standalone --nproc-per-node 2 benchmarks/convergence/convergence.py [--out FILE]

All wires of a seed train side by side in one process group: with the same start, batches and
schedule, so that they differ by the wire alone. After every step all parameters are compared
between the ranks, bit for bit; the first that differs ends the run with an error. On the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import torch
from torch.optim import Optimizer
from train import batch_loss, evaluate, first_difference, progress, shards, warmup_and_cosine

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.convergence.compared import compared
from benchmarks.convergence.trainings import TRAININGS, Task, Training
from benchmarks.report import tables
from benchmarks.report.table import text
from tritonddp import DistributedDataParallel

# By name, what the constructor is given. The others are compared with the first. (Ranks of one host
# would send nothing through memory, and what is sent is counted.)
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"transport": "process_group"},
    "bf16": {"reduce_dtype": torch.bfloat16, "transport": "process_group"},
    "int8": {"compression": "int8"},
    "int8 without feedback": {"compression": "int8", "error_feedback": False},
}


@dataclass
class Contender:
    """What one wire makes of one seed.

    Attributes:
        losses: on the held-out data, in nats per target, at each evaluation.
        sent_bytes: of a rank in the last step, see
        :class:`tritonddp.coordination.counters.Counters`.
    """

    ddp: Any
    optimizer: Optimizer
    schedule: Any
    losses: list[float] = field(default_factory=list)
    sent_bytes: int = 0


def main() -> int:
    options = _options()
    with process_group("gloo") as ranks:
        more = {"world_size": ranks.world_size, "backend": ranks.backend, "seeds": options.seeds}
        output = Output("convergence", options.out, ranks.rank == 0, **more)
        found: dict[str, Any] = {}
        for name in options.tasks:
            found[name] = measure(name, options, ranks)
            output.write({"tasks": found})
            output.say(*text(tables.convergence(output.only("tasks", name))))
        output.end()
    return 0


def measure(name: str, options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train with all seeds and wires; what JSON says about it."""
    training = TRAININGS[name]
    task = training.make_task()
    steps = options.steps or task.steps
    at = [steps * (i + 1) // training.evaluations for i in range(training.evaluations)]
    at = sorted({step for step in at if step})
    start = time.monotonic()
    by_seed = [train(task, training, options.wires, seed, at, ranks) for seed in options.seeds]
    losses = {wire: [seed[wire].losses for seed in by_seed] for wire in options.wires}
    return {
        "target": task.target,
        "parameters": sum(p.numel() for p in task.make_model().parameters()),
        "steps": steps,
        "batch_size": task.batch_size,
        "optimizer": f"{training.optimizer}, {task.lr:g}",
        "held_out_targets": task.held_out_targets.numel(),
        "seconds": time.monotonic() - start,
        "same_bits_after_steps": steps * len(options.seeds),  # of each wire; else it has ended
        "sent_bytes": {wire: by_seed[0][wire].sent_bytes for wire in options.wires},
        "comparisons": compared(losses),
        "evaluated_after": at,
        "losses": losses,  # wire, seed, evaluation
    }


def train(
    task: Task, training: Training, wires: list[str], seed: int, at: list[int], ranks: Ranks
) -> dict[str, Contender]:
    """Train all wires side by side.

    Args:
        at: the steps after which the held-out loss is taken; training ends with the last.

    Raises:
        RuntimeError: after some step a parameter is not the same on all ranks.
    """
    contenders = {wire: _contender(task, training, wire, seed, at[-1]) for wire in wires}
    batches = shards(len(task.inputs), task.batch_size, ranks.rank, ranks.world_size, seed)
    for step in progress(at[-1], f"{task.name}, seed {seed}, {len(wires)} wires"):
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
                f"{task.name}, seed {seed}: after step {step + 1} the ranks do not hold the same "
                f"bits of {difference}"
            )
        if step + 1 in at:
            for each in contenders.values():
                each.losses.append(evaluate(task, each.ddp, ranks.device)[0])
    return contenders


def _contender(task: Task, training: Training, wire: str, seed: int, steps: int) -> Contender:
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.make_model(), **WIRES[wire])
    optimizer = training.make_optimizer(ddp.parameters(), lr=task.lr)
    return Contender(ddp, optimizer, warmup_and_cosine(optimizer, steps))


def _options() -> argparse.Namespace:
    parser = command.parser(__doc__)
    for what, known in (("tasks", TRAININGS), ("wires", WIRES)):
        parser.add_argument(
            f"--{what}",
            nargs="+",
            choices=known,
            default=list(known),
            metavar="NAME",
            help=", ".join(known),
        )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=command.positive, help="default: the task's")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
