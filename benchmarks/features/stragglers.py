"""Are slow ranks named, with the right part of the step, and what does ``metrics=True`` cost?

    python benchmarks/features/stragglers.py [--ranks 2 3 4] [--injections N] [--even N]
        [--out FILE]

Trains an MLP on so many ranks over gloo. In each *injection* one rank sleeps for a share of a step
(5 to 100 %) in its input, forward or backward, from some step on; it counts after how many steps
that rank is named, and whether the part is right. Then as many steps as ``--even`` in which nobody
sleeps, and nobody is to be named. Last, with 2 ranks, steps with and without the option in turns.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import command, machine, processes
from benchmarks.base.command import Output
from benchmarks.base.deadline import interleaved
from benchmarks.base.paired import Ratio, Spread, paired_ratio
from benchmarks.base.ranks import process_group
from benchmarks.report.table import Blocks, Table, text
from tritonddp import DistributedDataParallel

PARTS = ("input", "forward", "backward")
CALM, WITHIN = 12, 40  # steps before an injection, and most that it lasts
SOON = 4  # steps: three that are slow, and one in which they are told
WIDTH, BATCH = 640, 400  # steps of more than 60 ms, each of which is measured
# What the option costs does not depend on the model; in the short steps of a small one it shows.
COST_WIDTH, COST_STEPS, COST_ROUNDS = 64, 100, 200


class Training:
    """Steps of a wrapped module; ``sleeps`` are seconds by part of the step."""

    def __init__(self, width: int = WIDTH, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width) for _ in range(6)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(BATCH, width)
        self.sleeps = dict.fromkeys(PARTS, 0.0)

    def step(self) -> None:
        time.sleep(self.sleeps["input"])
        outputs = self.model(self.inputs)
        time.sleep(self.sleeps["forward"])
        if self.sleeps["backward"]:
            outputs.register_hook(lambda grad: time.sleep(self.sleeps["backward"]))
        outputs.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - begin) / steps


def injections(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Each in a wrapper of its own; ``rng`` is the same on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for number in range(count):
        share = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)[number % 6]
        part, slow = PARTS[number // 6 % 3], rng.randrange(size)
        training = Training(metrics=True)
        training.seconds(6)  # of which the first ones do not count
        length = torch.tensor(training.seconds(CALM))
        dist.all_reduce(length, dist.ReduceOp.MAX)
        training.sleeps[part] = share * float(length) * (rank == slow)
        named, steps, before = None, 0, training.model.metrics()["slowest_rank"]
        while named is None and steps < WITHIN:
            training.step()
            steps += 1
            metrics = training.model.metrics()
            if metrics["slowest_rank"] is not None:
                named = metrics["slowest_rank"], metrics["slowest_phase"]
        one = {"ranks": size, "share": share, "part": part, "before": before, "steps": steps}
        found.append({**one, "named": named is not None, "right": named == (slow, part)})
    return found


def even(steps: int) -> int:
    """How often somebody is named anew although nobody sleeps."""
    training, named, before = Training(metrics=True), 0, None
    for _ in range(steps):
        training.step()
        now = training.model.metrics()["slowest_rank"]
        named += now is not None and now != before
        before = now
    return named


def cost() -> dict[str, Any]:
    """Seconds of a step without and with the option, in turns."""
    without, with_it = Training(COST_WIDTH), Training(COST_WIDTH, metrics=True)
    ways = {"without": without, "with": with_it}
    timed = {name: partial(each.seconds, COST_STEPS) for name, each in ways.items()}
    rounds = interleaved(timed, range(-1, COST_ROUNDS))
    ratio = paired_ratio(rounds["with"], rounds["without"])
    extra = Spread.of([a - b for a, b in zip(rounds["with"], rounds["without"], strict=True)])
    length = Spread.of(rounds["without"])
    return {
        "rounds": rounds,
        "ratio": vars(ratio),
        "step_us": length.median * 1e6,
        "extra_us": extra.median * 1e6,
    }


def of_ranks(options: argparse.Namespace) -> None:
    """What the ranks of one world do."""
    with process_group("gloo") as ranks:
        result: dict[str, Any] = {"ranks": ranks.world_size}
        result["injections"] = injections(options.injections, random.Random(ranks.world_size))
        result["even"] = {"steps": options.even, "named": even(options.even)}
        if ranks.world_size == 2:
            result["cost"] = cost()
        if ranks.rank == 0:
            machine.write_json(options.out, result)


def table(result: dict[str, Any]) -> Blocks:
    """A world's result."""
    named = f"{result['even']['named']} named in {result['even']['steps']} even steps"
    yield f"\n{result['ranks']} ranks: {named}"
    rows = []
    for share in sorted({each["share"] for each in result["injections"]}):
        those = [each for each in result["injections"] if each["share"] == share]
        steps = sorted(each["steps"] for each in those if each["right"])
        soon, total = sum(each <= SOON for each in steps), len(those)
        wrong = sum(each["named"] and not each["right"] for each in those)
        counts = f"{soon} of {total}", f"{len(steps)} of {total}", str(wrong)
        rows.append((f"{share:.0%}", *counts, str(steps[len(steps) // 2]) if steps else "-"))
    yield Table(("share", "named soon", "named", "wrong part or rank", "steps, median"), rows)
    if "cost" in result:
        of = result["cost"]
        yield (
            f"  a step of {of['step_us']:.0f} us with metrics / without: "
            f"{Ratio(**of['ratio'])}, {of['extra_us']:.0f} us more"
        )


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--injections", type=int, default=36, help="for each number of ranks")
    parser.add_argument("--even", type=int, default=1000, help="steps in which nobody sleeps")
    options = parser.parse_args()
    if "RANK" in os.environ:
        of_ranks(options)
        return
    output, worlds = Output("stragglers", options.out), []
    for size in options.ranks:
        more = ("--injections", options.injections, "--even", options.even)
        worlds.append(processes.run_ranks(size, *more))
        output.write({"worlds": worlds})
        output.say(*text(table(worlds[-1])))
    output.end()


if __name__ == "__main__":
    main()
