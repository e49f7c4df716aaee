"""Steps captured in a CUDA graph and replayed, beside the same steps run eagerly: ours and stock's.

    torchrun --standalone --nproc-per-node 1 benchmarks/gpu/graphs.py [--models mlp ...]
        [--out FILE]

Each configuration has two models with the same parameters: one steps eagerly, forward and backward,
of the other such a step is captured, after a dozen on a side stream, and replayed. All run in
interleaved rounds, from a barrier until the device is idle. Before that the gradients of a replay
are compared with those of an eager step, and the captured models' bytes on the wire are counted:
with one rank ours sends what it would send with several, and as users have it then, *idle*, it is
measured beside. What cannot be captured is told and left out, and is a failure of the benchmark if
it is ours. The result is written after each model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
from torch import nn

from benchmarks.base import command, deadline
from benchmarks.base.command import Output
from benchmarks.base.paired import Spread
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.models.cases import CASES, Batch, Case, loss
from benchmarks.models.configurations import (
    UNWRAPPED,
    Configuration,
    Families,
    families,
    idle_of,
)
from benchmarks.models.gradients import Gradient
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.comparison import check_exchange
from benchmarks.step.traffic import sent_in

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
            output.say(*text(tables.graphs(output.only("models", name))))
    return 1 if any(_is_ours(each) for model in results.values() for each in model["errors"]) else 0


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def measure(case: Case, ranks: Ranks, rounds: int, end: float) -> dict[str, Any]:
    """All configurations on one model until ``end``; what JSON says."""
    compared = _compared(case, ranks)
    configurations = [UNWRAPPED, *(each for family in compared for each in family.members)]
    batch = case.batch(ranks.device, seed=ranks.rank)
    copies = case.copies(ranks.device)
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    errors: dict[str, str] = {}
    sent: dict[str, int] = {}
    for configuration in configurations:
        name, models = configuration.name, (next(copies), next(copies))
        try:
            ways, sent[name] = _steps(configuration, *models, batch, ranks)
            steps.update({(name, way): step for way, step in ways.items()})
        except Exception as error:  # the others may be captured all the same
            errors[name] = f"{type(error).__name__}: {error}"
            ranks.synchronize()
    copies.close()
    check_exchange(compared, sent)
    numbers = deadline.rounds(rounds, end, discarded=DISCARDED, agreed=ranks.agreed)
    timed = {key: partial(ranks.timed, step) for key, step in steps.items()}
    seconds = deadline.interleaved(timed, numbers, case.name)
    timed.clear()
    steps.clear()
    gc.collect()
    torch.cuda.empty_cache()
    measured = [each.name for each in configurations if each.name not in errors]
    return {
        "errors": errors,
        "wire_bytes": sent,
        "rounds": len(next(iter(seconds.values()), ())),
        "seconds": {
            name: {way: asdict(Spread.of(seconds[name, way])) for way in (EAGER, REPLAYED)}
            for name in measured
        },
        "raw_seconds": {
            name: {way: seconds[name, way] for way in (EAGER, REPLAYED)} for name in measured
        },
    }


def _compared(case: Case, ranks: Ranks) -> Families:
    """Copies and views; with one rank also as users have it then."""
    found = []
    for each in families(case.unused):
        beside = (idle_of(each.ours),) if ranks.world_size == 1 else ()
        stock = each.stock[:1]
        found.append(replace(each, stock=stock, alike=(stock[0], stock[0]), beside=beside))
    return tuple(found)


def _steps(
    configuration: Configuration,
    eager: nn.Module,
    captured: nn.Module,
    batch: Batch,
    ranks: Ranks,
) -> tuple[dict[str, Callable[[], object]], int]:
    """An eager step, and a replay of a captured one; their gradients are compared.

    And what the captured model hands to collectives in a step.

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

    def capture() -> None:
        with torch.cuda.graph(graph):
            _step(models[1], batch)

    sent, _ = sent_in(capture, models[1], ranks.world_size)
    graph.replay()
    _step(models[0], batch)
    distance = Gradient.of(models[1]).off(Gradient.of(models[0]))
    if not distance <= TOLERANCE:
        raise RuntimeError(f"gradients of a replay are off by {distance} of their norm")
    return {EAGER: lambda: _step(models[0], batch), REPLAYED: graph.replay}, sent


def _step(model: nn.Module, batch: Batch) -> None:
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()


if __name__ == "__main__":
    sys.exit(main())
