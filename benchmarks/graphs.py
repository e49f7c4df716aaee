"""Steps captured in a CUDA graph and replayed, beside the same steps run eagerly: ours and stock's.

    torchrun --standalone --nproc-per-node 1 benchmarks/graphs.py [--models mlp ...] [--out FILE]

Each configuration has two models with the same parameters: one steps eagerly, forward and backward,
of the other such a step is captured, after a dozen on a side stream, and replayed. All run in
interleaved rounds, from a barrier until the device is idle. Before that the gradients of a replay
are compared with those of an eager step. What cannot be captured is told and left out, and is a
failure of the benchmark if it is ours. The result is written after each model.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import deadline
import machine
import torch
from configurations import UNWRAPPED, Configuration, families
from gradients import Gradient
from models import CASES, Batch, Case, loss
from ranks import Ranks, process_group
from torch import nn

from tritonddp.cli.kernel_timing.paired import Spread

# torch asks for 11 before a wrapped model is captured: stock records events of its own in the
# first 10.
WARM_UP = 12
DISCARDED = 2  # rounds
TOLERANCE = 1e-4  # of the norm of all gradients: atomic additions have no order
EAGER, REPLAYED = "eager", "replayed"


def main() -> int:
    options = _options()
    results: dict[str, Any] = {}
    with process_group("nccl") as ranks:
        facts = machine.describe()
        if ranks.rank == 0:
            print(machine.summary(facts), flush=True)
        for number, name in enumerate(options.models):
            end = deadline.share(1 / (len(options.models) - number))
            results[name] = measure(CASES[name], ranks, options.rounds, end)
            if ranks.rank == 0:
                print("\n".join(table(name, results[name])), flush=True)
                if options.out is not None:
                    content = {
                        "benchmark": "graphs",
                        "machine": facts,
                        "load_average_after": machine.describe()["load_average"],
                        "world_size": ranks.world_size,
                        "warm_up": WARM_UP,
                        "models": results,
                    }
                    machine.write_json(options.out, content)
    return 1 if any(_is_ours(each) for model in results.values() for each in model["errors"]) else 0


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def measure(case: Case, ranks: Ranks, rounds: int, end: float) -> dict[str, Any]:
    """All configurations on one model until ``end``; what JSON says."""
    compared = families(case.unused)
    configurations = [UNWRAPPED, *(each for f in compared for each in (f.stock[0], f.ours))]
    batch = case.batch(ranks.device, seed=ranks.rank)
    copies = case.copies(ranks.device)
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    errors: dict[str, str] = {}
    for configuration in configurations:
        try:
            steps.update(_steps(configuration, next(copies), next(copies), batch))
        except Exception as error:  # the others may be captured all the same
            errors[configuration.name] = f"{type(error).__name__}: {error}"
            ranks.synchronize()
    copies.close()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    shuffle, order = random.Random(case.name), list(steps)
    for number in deadline.rounds(rounds, end, discarded=DISCARDED, agreed=ranks.agreed):
        shuffle.shuffle(order)
        for key in order:
            ranks.barrier()
            start = time.perf_counter()
            steps[key]()
            ranks.synchronize()
            if number >= 0:
                seconds[key].append(time.perf_counter() - start)
    steps.clear()
    gc.collect()
    torch.cuda.empty_cache()
    measured = [each.name for each in configurations if each.name not in errors]
    return {
        "errors": errors,
        "rounds": len(next(iter(seconds.values()), ())),
        "seconds": {
            name: {way: asdict(Spread.of(seconds[name, way])) for way in (EAGER, REPLAYED)}
            for name in measured
        },
        "raw_seconds": {
            name: {way: seconds[name, way] for way in (EAGER, REPLAYED)} for name in measured
        },
    }


def _steps(
    configuration: Configuration, eager: nn.Module, captured: nn.Module, batch: Batch
) -> dict[tuple[str, str], Callable[[], object]]:
    """An eager step, and a replay of a captured one; their gradients are compared.

    Raises:
        RuntimeError: they differ, or the step cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # where torch wants stock to be wrapped and warmed up
        models = [configuration.wrap(each) for each in (eager, captured)]
        for _ in range(WARM_UP):
            for model in models:
                _step(model, batch)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    models[1].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        _step(models[1], batch)
    graph.replay()
    _step(models[0], batch)
    found, expected = Gradient.of(models[1]), Gradient.of(models[0])
    distance = 0.0 if found.equals(expected) else found.distance(expected)
    if not distance <= TOLERANCE:
        raise RuntimeError(f"gradients of a replay are off by {distance} of their norm")
    name = configuration.name
    return {
        (name, EAGER): lambda: _step(models[0], batch),
        (name, REPLAYED): graph.replay,
    }


def _step(model: nn.Module, batch: Batch) -> None:
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()


def table(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    """Lines that show a model's result; times in milliseconds."""
    yield f"\n{name}: {result['rounds']} rounds; a step, ms"
    yield f"  {'':20}{EAGER:>10}{REPLAYED:>10}{'above':>12}{'above':>12}"
    yield f"  {'':20}{'':20}{'unwrapped':>12}{'replayed':>12}"
    bare = result["seconds"].get(UNWRAPPED.name)
    for label, ways in result["seconds"].items():
        medians = [1e3 * ways[way]["median"] for way in (EAGER, REPLAYED)]
        above = [""] * 2
        if bare is not None and label != UNWRAPPED.name:
            base = [1e3 * bare[way]["median"] for way in (EAGER, REPLAYED)]
            above = [f"{a - b:.3f}" for a, b in zip(medians, base, strict=True)]
        yield f"  {label:20}{medians[0]:10.3f}{medians[1]:10.3f}{above[0]:>12}{above[1]:>12}"
    for label, error in result["errors"].items():
        yield f"  {label}: not captured: {error}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=["mlp", "transformer"])
    parser.add_argument("--rounds", type=int, default=20, help="timed (default 20)")
    parser.add_argument("--out", type=Path, help="write JSON here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
