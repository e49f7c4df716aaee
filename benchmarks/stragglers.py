"""Are slow ranks named, with the right part of the step, and what does ``metrics=True`` cost?

    python benchmarks/stragglers.py [--ranks 2 3 4] [--injections N] [--even N] [--out FILE]

Trains an MLP on so many ranks over gloo. In each *injection* one rank sleeps for a share of a step
(5 to 100 %) in its input, forward or backward, from some step on; it counts after how many steps
that rank is named, and whether the part is right. Then as many steps as ``--even`` in which nobody
sleeps, and nobody is to be named. Last, with 2 ranks, steps with and without the option in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine
import processes
from ranks import process_group

from tritonddp import DistributedDataParallel
from tritonddp.cli.kernel_timing.paired import Ratio, Spread, paired_ratio

PARTS = ("input", "forward", "backward")
CALM, WITHIN = 12, 40  # steps before an injection, and most that it lasts
SOON = 4  # steps: three that are slow, and one in which they are told
WIDTH, BATCH = 640, 400  # steps of more than 60 ms, each of which is measured
# What the option costs does not depend on the model; in the short steps of a small one it shows.
COST_WIDTH, COST_STEPS, COST_ROUNDS = 64, 100, 200
LIMIT = 1200.0  # seconds, of the ranks


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
    rounds: dict[str, list[float]] = {"without": [], "with": []}
    for each in (without, with_it):
        each.seconds(COST_STEPS)
    for number in range(COST_ROUNDS):
        pair = [("without", without), ("with", with_it)]
        for name, training in pair if number % 2 else reversed(pair):
            rounds[name].append(training.seconds(COST_STEPS))
    ratio = paired_ratio(rounds["with"], rounds["without"])
    extra = Spread.of([a - b for a, b in zip(rounds["with"], rounds["without"], strict=True)])
    length = Spread.of(rounds["without"])
    return {
        "rounds": rounds,
        "ratio": vars(ratio),
        "step_us": length.median * 1e6,
        "extra_us": extra.median * 1e6,
    }


def rank_main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with process_group("gloo") as ranks:
        result: dict[str, Any] = {"ranks": ranks.world_size}
        result["injections"] = injections(arguments.injections, random.Random(ranks.world_size))
        result["even"] = {"steps": arguments.even, "named": even(arguments.even)}
        if ranks.world_size == 2:
            result["cost"] = cost()
        if ranks.rank == 0:
            machine.write_json(arguments.out, result)


def report(result: dict[str, Any]) -> None:
    """Print a world's result."""
    print(
        f"\n{result['ranks']} ranks: {result['even']['named']} named in "
        f"{result['even']['steps']} even steps"
    )
    print("  share   named soon   named   wrong part or rank   steps, median")
    for share in sorted({each["share"] for each in result["injections"]}):
        those = [each for each in result["injections"] if each["share"] == share]
        named = sorted(each["steps"] for each in those if each["right"])
        soon = sum(steps <= SOON for steps in named)
        wrong = sum(each["named"] and not each["right"] for each in those)
        median = named[len(named) // 2] if named else "-"
        total = len(those)
        counts = f"{soon:6} of {total:2} {len(named):3} of {total:2}"
        print(f"  {share:5.0%} {counts} {wrong:12} {median:>20}")
    if "cost" in result:
        print(
            f"  a step of {result['cost']['step_us']:.0f} us with metrics / without: "
            f"{Ratio(**result['cost']['ratio'])}, {result['cost']['extra_us']:.0f} us more"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--injections", type=int, default=36, help="for each number of ranks")
    parser.add_argument("--even", type=int, default=1000, help="steps in which nobody sleeps")
    parser.add_argument("--out", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    facts = machine.describe()
    print(machine.summary(facts))
    worlds = []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.ranks:
            out = Path(folder) / f"{size}.json"
            command = [sys.executable, __file__, "--injections", str(arguments.injections)]
            command += ["--even", str(arguments.even), "--out", str(out)]
            codes = processes.run(command, LIMIT, sys.stdout.buffer, ranks=size)
            if any(codes) or None in codes:
                sys.exit(f"the ranks ended with {codes}")
            worlds.append(json.loads(out.read_text()))
            report(worlds[-1])
    if arguments.out:
        machine.write_json(arguments.out, {"machine": facts, "worlds": worlds})
        print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
