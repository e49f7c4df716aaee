"""How a step, wrapping and memory grow with parameters and with ranks, beside stock DDP.

    python benchmarks/growth/growth.py [--parameters 100 ...] [--ranks 2 ...] [--out FILE]

It starts its ranks itself, all on this machine. With more *parameters* (vectors of 64 elements, on
2 ranks): seconds of wrapping, seconds of a step in interleaved rounds, and by how much a process
has grown once it has trained, each configuration in processes of its own. With more *ranks* (the
MLP of 24 parameters): collectives and bytes of a step, and growth of the processes. Ranks of one
host exchange through memory and send nothing; through the process group they send what they would
send from hosts of their own. Ranks that share cores take turns, so their times mean nothing and are
not taken.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from torch import nn

from benchmarks.base import command, deadline, processes
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.base.results import Result
from benchmarks.models.cases import CASES, Case, ManyParameters, backward
from benchmarks.models.configurations import UNWRAPPED, Configuration, families, through
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.traffic import Traffic

PARAMETERS = (100, 1_000, 10_000, 100_000)
RANKS = (2, 4, 8, 16, 32)
SIZE = 64  # elements of a parameter
LONG = 20_000  # parameters: from here on of stock's ways one is enough, as each takes minutes
STEPS = 3  # before anything is measured: buckets are rebuilt after the first
COPIES = families()[0]
CONFIGURATIONS = {
    each.name: each
    for each in (
        UNWRAPPED,
        *COPIES.stock,
        COPIES.ours,
        through(COPIES.ours, "process_group", "ours, process group"),
    )
}
# Of a page that processes share, each has its part. Libraries, which are mapped too, do not count.
_COUNTED = ("Pss_Anon", "Pss_Shmem", "SwapPss")


def main() -> None:
    parser = command.parser(__doc__, rounds=20)
    for name, default in (("--parameters", PARAMETERS), ("--ranks", RANKS)):
        parser.add_argument(name, type=command.positive, nargs="+", default=default)
    parser.add_argument("--measure", choices=("times", "grown", "sent"), help="in a rank")
    parser.add_argument("--count", type=command.positive, help="in a rank: of parameters")
    parser.add_argument("--configuration", choices=CONFIGURATIONS, help="in a rank")
    options = parser.parse_args()
    if options.measure:
        _rank(options)
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks by the dozen would each take a part of a GPU
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    output = Output("growth", options.out, rounds=options.rounds)
    rows: list[dict[str, Any]] = []
    for row in chain(
        (row for count in options.parameters for row in _of_parameters(count, options.rounds)),
        (row for ranks in options.ranks for row in _of_ranks(ranks)),
    ):
        rows.append(row)
        output.write({"rows": rows})
    output.say("", *text(tables.growth(Result(output.content))))
    output.end()


def _of_parameters(count: int, rounds: int) -> Iterator[dict[str, Any]]:
    # Of 100,000 parameters a step takes seconds, and stock needs minutes to wrap them.
    rounds = min(rounds, max(3, rounds * 10_000 // count))
    times = _ranks(2, "times", count, "--rounds", rounds)
    for name, each in times.items():
        grown = _ranks(2, "grown", count, "--configuration", name)
        yield {"parameters": count, "ranks": 2, "name": name, **each, "grown": grown}


def _of_ranks(ranks: int) -> Iterator[dict[str, Any]]:
    for name, each in _ranks(ranks, "sent", None).items():
        grown = _ranks(ranks, "grown", None, "--configuration", name)
        yield {"parameters": 24, "ranks": ranks, "name": name, **each, "grown": grown}


def _ranks(ranks: int, measure: str, count: int | None, *arguments: object) -> Any:
    more = () if count is None else ("--count", count)
    limit = 300 + (count or 0) / 100
    return processes.run_ranks(ranks, "--measure", measure, *more, *arguments, limit=limit)["found"]


def _rank(options: Any) -> None:
    """In a rank: what is asked for."""
    case = CASES["mlp"] if options.count is None else _vectors(options.count)
    with process_group("gloo") as ranks:
        output = Output("growth", options.out, ranks.rank == 0)
        if options.measure == "times":
            found: Any = _times(case, ranks, options.rounds, (options.count or 0) > LONG)
        elif options.measure == "grown":
            found = _grown(case, ranks, CONFIGURATIONS[options.configuration])
        else:
            found = {each.name: _sent(case, ranks, each) for each in CONFIGURATIONS.values()}
        output.write({"found": found})


def _vectors(count: int) -> Case:
    make = partial(ManyParameters, count, SIZE)
    return Case(f"{count} vectors", make, CASES["many_small"].make_batch)


def _times(case: Case, ranks: Ranks, rounds: int, is_long: bool) -> dict[str, Any]:
    """Seconds of wrapping and of steps, of the slowest rank."""
    batch = case.batch(ranks.device, ranks.rank)
    copies = case.copies(ranks.device)
    models: dict[str, nn.Module] = {}
    wrapping: dict[str, list[float]] = {}
    _train(_vectors(2), ranks, COPIES.stock[0])  # what is imported and connected once
    _train(_vectors(2), ranks, COPIES.ours)
    order = [
        each for each in CONFIGURATIONS.values() if not is_long or each.name != "stock batched"
    ]
    random.Random(case.name).shuffle(order)  # the same on all ranks
    for each in order:
        drawn = next(copies)

        def wrap(each: Configuration = each, drawn: nn.Module = drawn) -> None:
            models[each.name] = each.wrap(drawn)

        wrapping[each.name] = [ranks.timed(wrap)]
    copies.close()
    ways: dict[str, Callable[[], float]] = {
        name: partial(ranks.timed, partial(backward, model, batch))
        for name, model in models.items()
    }
    gc.collect()
    gc.freeze()  # or each step would look through all models
    steps = ranks.slowest(deadline.interleaved(ways, range(-STEPS, rounds), case.name))
    wrapped, bare = ranks.slowest(wrapping), steps[UNWRAPPED.name]
    return {
        name: {
            "wrapping_seconds": median(wrapped[name]),
            "step_seconds": median(steps[name]),
            "above_seconds": median(map(sub, steps[name], bare)),  # within a round
            "raw_step_seconds": steps[name],
        }
        for name in CONFIGURATIONS
        if name in steps
    }


def _train(case: Case, ranks: Ranks, configuration: Configuration) -> nn.Module:
    batch = case.batch(ranks.device, ranks.rank)
    model = configuration.wrap(case.model(ranks.device))
    for _ in range(STEPS):
        backward(model, batch)
    return model


def _grown(case: Case, ranks: Ranks, configuration: Configuration) -> int:
    """Bytes by which this process has grown from before the model to after some steps; the most."""
    _train(_vectors(2), ranks, configuration)  # what is imported and connected once
    ranks.barrier()
    before = _own()
    model = _train(case, ranks, configuration)
    ranks.barrier()
    after = _own()
    del model
    return max(ranks.gathered(after - before))


def _own() -> int:
    """Bytes of this process in memory, without what the C library holds back for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = dict(
        line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return sum(1024 * int(found[name].split()[0]) for name in _COUNTED if name in found)


def _sent(case: Case, ranks: Ranks, configuration: Configuration) -> dict[str, int]:
    """Of one step of this rank. (All have the same.)"""
    batch = case.batch(ranks.device, ranks.rank)
    model = _train(case, ranks, configuration)
    found = Traffic.of(model, batch, ranks, with_launches=False)
    return {
        "collectives": found.collectives,
        "wire_bytes": found.wire_bytes,
        "sent_bytes": found.sent_bytes,
    }


if __name__ == "__main__":
    main()
