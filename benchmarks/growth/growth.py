"""How a step, the construction and memory grow with parameters and with ranks, beside stock DDP.

    python benchmarks/growth/growth.py [--parameters 100 ...] [--ranks 2 ...] [--out FILE]

It starts its ranks itself, all on this machine. With more *parameters* (vectors of 64 elements, on
2 ranks): seconds of wrapping, seconds of a step in interleaved rounds, and by how much a process
has grown once it has trained, each configuration in processes of its own. With more *ranks* (the
MLP of 24 parameters): collectives and bytes of a step, which are exact wherever the ranks are, and
growth of the processes. Ranks that share cores take turns, so their times mean nothing and are not
taken: for more hosts see the cost model (scale.py, and ``tritonddp doctor``).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
from torch import nn

from benchmarks.base import command, deadline, processes
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.base.results import Result
from benchmarks.models.cases import CASES, Case, ManyParameters, loss
from benchmarks.models.configurations import UNWRAPPED, Configuration, families
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.traffic import Traffic

PARAMETERS = (100, 1_000, 10_000, 100_000)
RANKS = (2, 4, 8, 16, 32)
SIZE = 64  # elements of a parameter
STEPS = 3  # before anything is measured: buckets are rebuilt after the first
CONSTRUCTIONS = 3
COPIES = families()[0]
# Through the process group, as ranks of several hosts would.
OVER_GLOO = replace(
    COPIES.ours,
    name="ours, process group",
    options={**COPIES.ours.options, "transport": "process_group"},
)
CONFIGURATIONS = {each.name: each for each in (UNWRAPPED, COPIES.stock[0], COPIES.ours, OVER_GLOO)}
LIMIT = 900.0  # seconds of one set of ranks


def main() -> None:
    parser = command.parser(__doc__, rounds=20)
    for name, default in (("--parameters", PARAMETERS), ("--ranks", RANKS)):
        parser.add_argument(name, type=command.positive, nargs="+", default=default)
    parser.add_argument("--measure", choices=("times", "grown", "sent"), help="in a rank")
    parser.add_argument("--configuration", choices=CONFIGURATIONS, help="in a rank")
    options = parser.parse_args()
    if options.measure:
        _rank(options)
        return
    output = Output("growth", options.out, rounds=options.rounds)
    rows: list[dict[str, Any]] = []
    for row in chain(_of_parameters(options), _of_ranks(options)):
        rows.append(row)
        output.write({"rows": rows})
    output.say("", *text(tables.growth(Result(output.content))))
    output.end()


def _of_parameters(options: Any) -> Iterator[dict[str, Any]]:
    for count in options.parameters:
        # Of 100,000 parameters a step takes seconds.
        rounds = max(5, min(options.rounds, options.rounds * 10_000 // count))
        times = _ranks(2, "times", "--parameters", count, "--rounds", rounds)
        grown = _grown(2, count)
        for name, each in times.items():
            yield {"parameters": count, "ranks": 2, "name": name, **each, "grown": grown[name]}


def _of_ranks(options: Any) -> Iterator[dict[str, Any]]:
    for ranks in options.ranks:
        sent = _ranks(ranks, "sent")
        grown = _grown(ranks)
        for name, each in sent.items():
            yield {"parameters": 24, "ranks": ranks, "name": name, **each, "grown": grown[name]}


def _ranks(ranks: int, measure: str, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = processes.run_ranks(
        ranks, "--measure", measure, *arguments, limit=LIMIT
    )
    return found["found"]


def _grown(ranks: int, *count: int) -> dict[str, int]:
    """By how many bytes processes have grown, by configuration."""
    more = ("--parameters", *count) if count else ()
    return {name: _ranks(ranks, "grown", "--configuration", name, *more) for name in CONFIGURATIONS}


def _rank(options: Any) -> None:
    """In a rank: what is asked for."""
    case = CASES["mlp"]
    if options.parameters is not PARAMETERS:
        (count,) = options.parameters
        case = Case(
            f"{count} vectors", partial(ManyParameters, count, SIZE), CASES["many_small"].make_batch
        )
    with process_group("gloo") as ranks:
        output = Output("growth", options.out, ranks.rank == 0)
        if options.measure == "times":
            found: Any = _times(case, ranks, options.rounds)
        elif options.measure == "grown":
            found = _resident(case, ranks, CONFIGURATIONS[options.configuration])
        else:
            found = {each.name: _sent(case, ranks, each) for each in CONFIGURATIONS.values()}
        output.write({"found": found})


def _times(case: Case, ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Seconds of constructions and of steps, of the slowest rank."""
    batch = case.batch(ranks.device, ranks.rank)
    copies = case.copies(ranks.device)
    constructions: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    models: dict[str, nn.Module] = {}
    for _ in range(CONSTRUCTIONS):
        for name, each in CONFIGURATIONS.items():
            models.pop(name, None)
            gc.collect()
            drawn = next(copies)
            made: list[nn.Module] = []
            wrap: Callable[[], object] = partial(_into, made, each, drawn)
            constructions[name].append(ranks.timed(wrap))
            (models[name],) = made
            del drawn, made, wrap
    copies.close()
    ways = {
        name: partial(ranks.timed, partial(_step, model, batch)) for name, model in models.items()
    }
    numbers = range(-STEPS, rounds)
    steps = ranks.slowest(deadline.interleaved(ways, numbers, case.name))
    built = ranks.slowest(constructions)
    return {
        name: {
            "construction_seconds": median(built[name]),
            "step_seconds": median(steps[name]),
            "raw_step_seconds": steps[name],
        }
        for name in CONFIGURATIONS
    }


def _into(made: list[nn.Module], configuration: Configuration, drawn: nn.Module) -> None:
    made.append(configuration.wrap(drawn))


def _step(model: nn.Module, batch: Any) -> None:
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()


def _resident(case: Case, ranks: Ranks, configuration: Configuration) -> int:
    """Bytes by which this process has grown from before the model to after some steps; the most."""
    batch = case.batch(ranks.device, ranks.rank)
    torch.ones(8, requires_grad=True).square().sum().backward()  # what autograd takes once
    ranks.barrier()
    gc.collect()
    before = _own()
    model = configuration.wrap(case.model(ranks.device))
    for _ in range(STEPS + 2):
        _step(model, batch)
    gc.collect()
    return max(ranks.gathered(_own() - before))


def _own() -> int:
    """Bytes of this process in memory; of a page that ranks share, its part of it (PSS).

    What the C library holds back for later goes first.
    """
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/smaps_rollup").read_text()
    (kilobytes,) = (line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))
    return 1024 * int(kilobytes)


def _sent(case: Case, ranks: Ranks, configuration: Configuration) -> dict[str, int]:
    """Of one step of this rank. (All have the same.)"""
    batch = case.batch(ranks.device, ranks.rank)
    model = configuration.wrap(case.model(ranks.device))
    for _ in range(STEPS):
        _step(model, batch)
    found = Traffic.of(model, batch, ranks, with_launches=False)
    return {
        "collectives": found.collectives,
        "wire_bytes": found.wire_bytes,
        "sent_bytes": found.sent_bytes,
    }


if __name__ == "__main__":
    main()
