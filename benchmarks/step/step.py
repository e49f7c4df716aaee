"""Backward time of stock DDP, tritonddp and the unwrapped model, in interleaved rounds.

    torchrun --standalone --nproc-per-node 2 benchmarks/step/step.py [--models mlp ...]
        [--families copies bf16 ...] [--out FILE]

One process group and one process per rank hold all configurations of a model. In each round every
configuration runs once, in a newly shuffled order (the same on all ranks): the forward, a barrier,
then the backward, which is timed with the device synchronized. A sample is the time of the slowest
rank. Models are rebuilt several times, to sample memory layouts. Before any timing, the gradients
of all configurations are compared, and the bytes and launches of each backward are counted. Nothing
is timed if a side of a comparison sends nothing.

A family is compared with stock: copied gradients or views of buckets, a wire format with fewer
bytes, or wrappers under torch.compile. With one rank, tritonddp sends what it would send with
several ranks. Its normal behavior with one rank, *idle*, is measured too, but not compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

from benchmarks.base.ranks import Ranks
from benchmarks.base.results import Result
from benchmarks.models.cases import Batch, Case, loss
from benchmarks.models.configurations import (
    MODES,
    UNWRAPPED,
    WIRES,
    Configuration,
    Families,
    compiled,
    families,
    on_cards,
    once,
    through,
    wires,
)
from benchmarks.models.gradients import STEPS, WrongGradients, check
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.comparison import Bound, Comparison, IdleError, check_exchange, overhead
from benchmarks.step.plan import Plan, parser, run
from benchmarks.step.rounds import Rounds
from benchmarks.step.traffic import Traffic, exposed


def main() -> int:
    arguments = parser(__doc__, rounds=12)
    what = f"to compare (default: {' '.join(MODES)})"
    choices = (*MODES, *(wire for wire in WIRES if wire != "fp32"), "compiled")
    arguments.add_argument("--families", nargs="+", choices=choices, default=list(MODES), help=what)
    arguments.add_argument("--transport", default="auto", help="of ours (default auto)")
    options = arguments.parse_args()
    transport = options.transport
    choose = partial(compared, names=options.families, transport=transport)
    measured = partial(measure, choose=choose)
    return run("step", options, measured, show, REFUSED, transport=transport)[0]


REFUSED = (WrongGradients, IdleError)
Choose = Callable[[Case, Ranks, Plan], Families]


def measure(case: Case, ranks: Ranks, plan: Plan, end: float, choose: Choose) -> dict[str, Any]:
    """Check, count and time all configurations of one model until ``end``. Return JSON content.

    ``choose`` selects what is compared; it is collective.
    """
    is_gpu = ranks.device.type == "cuda"
    groups = choose(case, ranks, plan)
    members = (each for group in groups for each in group.members)
    configurations = once((UNWRAPPED, *members))
    profiled = once(each for group in groups for each in (UNWRAPPED, group.stock[0], group.ours))
    errors = {each.name: each.error for each in configurations}
    is_compiled = any(each.is_compiled for each in configurations)
    rounds = Rounds(case, configurations, ranks, plan, end)
    agreement: dict[str, Any] = {}
    traffic: dict[str, Traffic] = {}
    late: dict[str, float] = {}
    for build, models in enumerate(rounds.builds()):
        if is_compiled:  # compiles lazily; compilations of an earlier build must not count
            torch._dynamo.reset()
        if build == 0:
            first = groups[0]
            alike = first.alike[0].name, first.alike[1].name
            agreement = check(models, case, ranks, first.stock[0].name, alike, errors)
        rounds.settle(models, STEPS if build == 0 else 0)
        if build == 0:
            batch = rounds.batch(0)
            for each in configurations:
                model = models[each.name]
                found = Traffic.of(model, batch, ranks, each in profiled)
                traffic[each.name] = found
                if is_gpu and not case.unused:
                    late[each.name] = exposed(model, batch, ranks)
            if is_compiled:
                from torch._dynamo.utils import counters  # takes seconds to import

                if not counters["stats"]["unique_graphs"]:
                    raise IdleError("nothing was compiled: nothing was timed")
            sent = {name: each.wire_bytes for name, each in traffic.items()}
            known = {name: nbytes for name, nbytes in sent.items() if nbytes is not None}
            check_exchange(groups, known)
        rounds.run(models)
    seconds, steps, content = rounds.gathered()
    # Stock searches for unused parameters in the forward, so its backward is not the whole cost
    # there. On a GPU, the host's work is spread over both, and the overhead of steps counts.
    of_steps = case.unused or is_gpu
    return {
        "gradients": {name: asdict(each) for name, each in agreement.items()},
        "overhead_seconds": {each.name: overhead(steps, each.name) for each in configurations[1:]},
        "exposed_seconds": late,
        **{
            key: {name: getattr(each, key) for name, each in traffic.items()}
            for key in ("wire_bytes", "sent_bytes", "collectives", "launches")
        },
        "comparisons": {
            family.name: {
                "of": "whole steps" if of_steps else "backwards",
                **Comparison.of(family, steps if of_steps else seconds, steps).judged(
                    Bound.of(case, ranks, family.name)
                ),
            }
            for family in groups
        },
        **content,
    }


def compared(
    case: Case, ranks: Ranks, plan: Plan, names: Sequence[str], transport: str
) -> Families:
    """Return the families with these names, with ours on this transport; collective."""
    if ranks.device.type == "cuda":
        copies = case.copies(ranks.device)
        sizes = partial(sizes_of, copies, case.batch(ranks.device, ranks.rank))
        groups = on_cards(names, sizes, case.unused, ranks.world_size == 1)
    else:
        modes = {each.name: each for each in (*families(case.unused), *wires(), compiled())}
        groups = tuple(modes[name] for name in names)
    if transport == "auto":
        return groups
    return tuple(replace(each, ours=through(each.ours, transport)) for each in groups)


def sizes_of(copies: Iterator[nn.Module], batch: Batch, ours: Configuration) -> list[float]:
    """Return the sizes of our buckets, in MiB of gradients, in launch order; collective."""
    model: Any = ours.wrap(next(copies))
    for _ in range(2):  # buckets are rebuilt after the first backward
        loss(model, batch).backward()
    return [sum(each.nbytes for each in one.params) / 2**20 for one in model.reducer.buckets]


def show(step: Result) -> Iterator[str]:
    """Yield lines that show the results of some models."""
    for name, model in step.models.items():
        if model.gradients:
            worst = max(each["error"] for each in model.gradients.values())
            same = all(each["same_bits"] for each in model.gradients.values())
            how = "bit-equal to stock's" if same else f"off stock's by {worst:.1e} of their norm"
            yield f"{name}: gradients {how}, the same on all ranks; {model.rounds} rounds"
    yield from text([*tables.configurations(step), *tables.comparisons(step)])
    for one in step.compared:
        builds = " ".join(f"{ratio:.3f}" for ratio in one.by_build or ())
        low, high = one.overhead_interval or (0, 0)
        over = f"overhead ratio {one.overhead:.2f} [{low:.2f} {high:.2f}]"
        yield f"  {one.gradients}: {one.of} by build {builds}; {over}"


if __name__ == "__main__":
    sys.exit(main())
