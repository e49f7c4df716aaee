"""Steps captured in a CUDA graph and replayed, beside the same steps run eagerly: ours and stock's.

    torchrun --standalone --nproc-per-node 1 benchmarks/gpu/graphs.py [--models mlp ...]
        [--out FILE]

Each configuration has two models with the same parameters: one steps eagerly, forward and backward,
of the other such a step is captured, after a dozen on a side stream, and replayed. All run in
interleaved rounds, from a barrier until the device is idle. Before that the gradients of a replay
are compared with those of an eager step. What cannot be captured is told and left out, and is a
failure of the benchmark if it is ours. The result is written after each model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
from torch import nn

from benchmarks.base import command, deadline
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.models.cases import CASES, Batch, Case, loss
from benchmarks.models.configurations import UNWRAPPED, Configuration, families
from benchmarks.models.gradients import Gradient
from benchmarks.report.table import Blocks, Table, ms, text
from tritonddp.cli.kernel_timing.paired import Spread

# torch asks for 11 before a wrapped model is captured: stock records events of its own in the
# first 10.
WARM_UP = 12
DISCARDED = 2  # rounds
TOLERANCE = 1e-4  # of the norm of all gradients: atomic additions have no order
EAGER, REPLAYED = "eager", "replayed"


def main() -> int:
    models = ["mlp", "transformer"]
    options = command.parser(__doc__, rounds=20, models=(CASES, models)).parse_args()
    results: dict[str, Any] = {}
    with process_group("nccl") as ranks:
        more = {"world_size": ranks.world_size, "warm_up": WARM_UP}
        output = Output("graphs", options.out, ranks.rank == 0, **more)
        for name, end in deadline.shares(options.models):
            results[name] = measure(CASES[name], ranks, options.rounds, end)
            output.write({"models": results})
            output.say(*text(table(name, results[name])))
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
    numbers = deadline.rounds(rounds, end, discarded=DISCARDED, agreed=ranks.agreed)
    ways = {key: partial(ranks.timed, step) for key, step in steps.items()}
    seconds = deadline.interleaved(ways, numbers, case.name)
    ways.clear()
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
    distance = Gradient.of(models[1]).off(Gradient.of(models[0]))
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


def table(name: str, result: Mapping[str, Any]) -> Blocks:
    """A model's result, and what of it is above the unwrapped model."""
    bare = result["seconds"].get(UNWRAPPED.name)
    rows = []
    for label, ways in result["seconds"].items():
        medians = [ways[way]["median"] for way in (EAGER, REPLAYED)]
        above = ["-"] * 2
        if bare is not None and label != UNWRAPPED.name:
            base = [bare[way]["median"] for way in (EAGER, REPLAYED)]
            above = [ms(a - b) for a, b in zip(medians, base, strict=True)]
        rows.append((label, *map(ms, medians), *above))
    title = f"{name}: {result['rounds']} rounds; a step, ms"
    yield Table((title, EAGER, REPLAYED, "above unwrapped", "above it, replayed"), rows)
    for label, error in result["errors"].items():
        yield f"  {label}: not captured: {error}"


if __name__ == "__main__":
    sys.exit(main())
