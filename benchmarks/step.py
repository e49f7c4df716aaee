"""Backward time of stock DDP, tritonddp and the unwrapped model, in interleaved rounds.

    torchrun --standalone --nproc-per-node 2 benchmarks/step.py [--models mlp ...] [--out FILE]

One process group and one process per rank hold all configurations of a model side by side. In
each round every configuration runs once, in an order shuffled anew (the same on all ranks): the
forward, then a barrier, then the backward, which is what is timed, device synchronised. A sample
is the time of the slowest rank. Models are built several times, so that where memory happens to
lie is sampled too. Before any timing, gradients of all configurations are compared.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine
from configurations import UNWRAPPED, Configuration, Family, families
from models import CASES, Case, loss
from paired import Ratio, Spread, paired_ratio
from ranks import Ranks, process_group

# Backwards before the timed ones of each build: torch and tritonddp rebuild their buckets after
# the first, and allocators come to rest.
DISCARDED = 5
CHECKED_STEPS = 3
BOUND = 1.02


@dataclass(frozen=True)
class Agreement:
    """How the gradients of a configuration compare with those of stock DDP.

    Attributes:
        same_bits: all bits, in every checked step.
        error: largest ``|ours - stock| / |stock|`` of a whole model's gradient, in norms.
        same_on_all_ranks: all bits of all ranks, in every checked step.
    """

    same_bits: bool
    error: float
    same_on_all_ranks: bool


@dataclass(frozen=True)
class Comparison:
    """tritonddp against the best configuration of stock DDP, of one family.

    Attributes:
        best: stock's configuration with the lowest median in this run.
        ours: ours / best.
        by_build: the median of ours / best in each build.
        again: stock / the same stock once more; what the comparison cannot resolve.
        overhead: (ours - unwrapped) / (best - unwrapped), of medians over paired differences.
    """

    best: str
    ours: Ratio
    by_build: list[float]
    again: Ratio
    overhead: float

    @property
    def allowed(self) -> float:
        """What ``ours`` may be: 1.02, or the end of stock's interval against itself."""
        return max(BOUND, self.again.high, 1 / self.again.low)


def main() -> None:
    options = _options()
    with process_group(options.backend) as ranks:
        facts = machine.describe()
        if ranks.rank == 0:
            print(machine.summary(facts))
            print(
                f"{ranks.world_size} ranks over {ranks.backend} on {ranks.device.type}, "
                f"{options.builds} builds of {options.rounds} rounds, {DISCARDED} more discarded, "
                f"gradients zeroed to {'zeros' if options.zeros else 'None'}",
                flush=True,
            )
        results = {}
        for name in options.models:
            results[name] = measure(
                CASES[name], ranks, options.rounds, options.builds, options.zeros
            )
            if ranks.rank == 0:
                _print(name, results[name])
        if ranks.rank == 0 and options.out is not None:
            content = {
                "benchmark": "step",
                "machine": facts,
                "load_average_after": machine.describe()["load_average"],
                "world_size": ranks.world_size,
                "backend": ranks.backend,
                "device": ranks.device.type,
                "rounds": options.rounds,
                "builds": options.builds,
                "discarded": DISCARDED,
                "zero_grad_to": "zeros" if options.zeros else "None",
                "models": results,
            }
            machine.write_json(options.out, content)
            print(f"\nwritten to {options.out}")


def measure(case: Case, ranks: Ranks, rounds: int, builds: int, zeros: bool) -> dict[str, Any]:
    """Check and time all configurations on one model; what JSON says about it."""
    shuffle = random.Random(case.name)  # the same on all ranks
    configurations = [UNWRAPPED, *(member for family in families() for member in family.members)]
    agreement: dict[str, Agreement] = {}
    seconds: dict[str, list[list[float]]] = {each.name: [] for each in configurations}
    for build in range(builds):
        shuffle.shuffle(configurations)
        models = {each.name: each.wrap(case.model(ranks.device)) for each in configurations}
        if build == 0:
            agreement = check(models, case, ranks)
        batch = case.batch(ranks.device, seed=1000 + ranks.rank)
        samples = time_backwards(models, batch, ranks, rounds, shuffle, zeros)
        for name, values in samples.items():
            seconds[name].append(values)
        models.clear()
        gc.collect()
    per_rank: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(per_rank, seconds)
    slowest = {
        name: [
            list(map(max, zip(*(one[name][build] for one in per_rank), strict=True)))
            for build in range(builds)
        ]
        for name in seconds
    }
    comparisons = {family.name: compare(family, slowest) for family in families()}
    return {
        "gradients": {name: asdict(each) for name, each in agreement.items()},
        "seconds": {name: asdict(Spread.of(flat(slowest[name]))) for name in slowest},
        "overhead_seconds": {
            name: overhead(slowest, name) for name in slowest if name != UNWRAPPED.name
        },
        "comparisons": {
            name: {**asdict(each), "allowed": each.allowed} for name, each in comparisons.items()
        },
        "raw_seconds_per_rank": per_rank,  # rank, configuration, build, round
    }


def check(models: dict[str, nn.Module], case: Case, ranks: Ranks) -> dict[str, Agreement]:
    """Compare the gradients of all wrapped models with stock's, and between the ranks.

    Several steps with a batch each: buckets are rebuilt after the first, and stale gradients show.

    Raises:
        RuntimeError: on all ranks, where gradients differ by more than rounding. On the CPU with
            at most 2 ranks every bit must agree.
    """
    exact = ranks.device.type == "cpu" and ranks.world_size <= 2
    found: dict[str, list[Agreement]] = {}
    problems: list[str] = []
    for step in range(CHECKED_STEPS):
        batch = case.batch(ranks.device, seed=100 * step + ranks.rank)
        gradients = {}
        for name, model in models.items():
            loss(model, batch).backward()
            gradients[name] = _gradient(model)
            model.zero_grad(set_to_none=True)
        expected = gradients["stock"]
        if ranks.world_size > 1 and torch.equal(expected, gradients[UNWRAPPED.name]):
            problems.append(f"step {step}: nothing was averaged, or the ranks' batches are equal")
        for name in sorted(gradients):
            if name == UNWRAPPED.name:
                continue
            gradient = gradients[name]
            error = float((gradient - expected).norm() / expected.norm())
            one = Agreement(torch.equal(gradient, expected), error, _same_on_all(gradient, ranks))
            found.setdefault(name, []).append(one)
            if not (one.same_bits or (error <= 1e-5 and not exact)):
                problems.append(f"step {step}: gradients of {name!r} are off stock's by {error}")
            if not one.same_on_all_ranks:
                problems.append(f"step {step}: gradients of {name!r} differ between ranks")
    everywhere: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everywhere, problems)
    if any(everywhere):
        raise RuntimeError(f"{case.name}: wrong gradients, nothing was timed: {everywhere}")
    return {
        name: Agreement(
            all(each.same_bits for each in steps),
            max(each.error for each in steps),
            all(each.same_on_all_ranks for each in steps),
        )
        for name, steps in found.items()
    }


def time_backwards(
    models: dict[str, nn.Module],
    batch: tuple[Tensor, Tensor],
    ranks: Ranks,
    rounds: int,
    shuffle: random.Random,
    zeros: bool,
) -> dict[str, list[float]]:
    """Seconds of this rank's backwards, by configuration, in the order of rounds."""
    samples: dict[str, list[float]] = {name: [] for name in models}
    order = list(models)
    for number in range(DISCARDED + rounds):
        shuffle.shuffle(order)
        for name in order:
            model = models[name]
            value = loss(model, batch)
            model.zero_grad(set_to_none=not zeros)
            ranks.barrier()
            start = time.perf_counter()
            value.backward()
            ranks.synchronize()
            elapsed = time.perf_counter() - start
            if number >= DISCARDED:
                samples[name].append(elapsed)
    return samples


def compare(family: Family, seconds: dict[str, list[list[float]]]) -> Comparison:
    """Ours against stock's best configuration.

    Choosing the best by the same rounds flatters stock a little, never us.
    """

    def median(configuration: Configuration) -> float:
        return Spread.of(flat(seconds[configuration.name])).median

    best = min(family.stock, key=median).name
    ours = family.ours.name
    first, again = seconds[family.stock[0].name], seconds[family.again.name]
    pairs = zip(seconds[ours], seconds[best], strict=True)
    return Comparison(
        best=best,
        ours=paired_ratio(flat(seconds[ours]), flat(seconds[best])),
        by_build=[paired_ratio(*pair).median for pair in pairs],
        again=paired_ratio(flat(again), flat(first)),
        overhead=overhead(seconds, ours) / overhead(seconds, best),
    )


def overhead(seconds: dict[str, list[list[float]]], name: str) -> float:
    """Median over rounds of what a configuration takes beyond the unwrapped model."""
    pairs = zip(flat(seconds[name]), flat(seconds[UNWRAPPED.name]), strict=True)
    return Spread.of([wrapped - bare for wrapped, bare in pairs]).median


def flat(builds: Sequence[Sequence[float]]) -> list[float]:
    """The rounds of all builds in one list."""
    return [value for build in builds for value in build]


def _gradient(model: nn.Module) -> Tensor:
    """All gradients of a model in one vector; a missing one is NaN, which equals nothing."""
    return torch.cat(
        [
            torch.full_like(param, torch.nan).flatten()
            if param.grad is None
            else param.grad.flatten()
            for param in model.parameters()
        ]
    )


def _same_on_all(gradient: Tensor, ranks: Ranks) -> bool:
    of_rank_0 = gradient.clone()
    dist.broadcast(of_rank_0, src=0)
    return torch.equal(of_rank_0, gradient)


def _print(name: str, result: dict[str, Any]) -> None:
    for line in table(name, result):
        print(line)
    sys.stdout.flush()


def table(name: str, result: dict[str, Any]) -> Iterator[str]:
    """Lines that show a model's result; times in milliseconds."""
    agreement = result["gradients"].values()
    if all(each["same_bits"] for each in agreement):
        gradients = "gradients bit-equal to stock's"
    else:
        worst = max(each["error"] for each in agreement)
        gradients = f"gradients equal to stock's within {worst:.1e} of their norm"
    yield f"\n{name}: {gradients}, the same on all ranks"
    yield f"  {'backward, ms':22}{'median':>9}{'quartiles':>18}{'above unwrapped':>17}"
    for family in (None, *families()):
        members = (UNWRAPPED,) if family is None else family.members
        for configuration in members:
            spread = result["seconds"][configuration.name]
            extra = result["overhead_seconds"].get(configuration.name)
            quartiles = f"{spread['q1'] * 1e3:.2f} - {spread['q3'] * 1e3:.2f}"
            yield (
                f"  {configuration.name:22}{spread['median'] * 1e3:9.2f}{quartiles:>18}"
                + (f"{extra * 1e3:17.2f}" if extra is not None else "")
            )
    for family in families():
        one = result["comparisons"][family.name]
        yield (
            f"  {family.name}: ours / {one['best']!r} {Ratio(**one['ours'])}, "
            f"stock / itself {Ratio(**one['again'])}: {_verdict(one)}"
        )
        builds = " ".join(f"{ratio:.3f}" for ratio in one["by_build"])
        yield f"          by build {builds}; overhead ratio {one['overhead']:.2f}"


def _verdict(comparison: dict[str, Any]) -> str:
    ours, allowed = comparison["ours"]["median"], comparison["allowed"]
    if ours <= BOUND:
        return f"at most {BOUND}"
    if ours <= allowed:
        return f"above {BOUND}, within stock's own spread of {allowed:.3f}"
    return f"ABOVE {BOUND} and stock's own spread of {allowed:.3f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=25, help="timed, per build (default 25)")
    parser.add_argument("--builds", type=int, default=3, help="of all models (default 3)")
    parser.add_argument("--backend", help="default: nccl with a CUDA device, else gloo")
    parser.add_argument(
        "--zeros", action="store_true", help="zero gradients in place, not by setting them to None"
    )
    parser.add_argument("--out", type=Path, help="write JSON with the raw rounds here")
    options = parser.parse_args()
    if options.rounds < 1 or options.builds < 1:
        parser.error("--rounds and --builds must be at least 1")
    return options


if __name__ == "__main__":
    main()
