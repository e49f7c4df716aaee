"""Backward time of stock DDP, tritonddp and the unwrapped model, in interleaved rounds.

    torchrun --standalone --nproc-per-node 2 benchmarks/step/step.py [--models mlp ...] [--by-wire]
        [--out FILE]

One process group and one process per rank hold all configurations of a model side by side. In
each round every configuration runs once, in an order shuffled anew (the same on all ranks): the
forward, then a barrier, then the backward, which is what is timed, device synchronised. A sample
is the time of the slowest rank. Models are built several times, so that where memory happens to
lie is sampled too. Before any timing, gradients of all configurations are compared; after it, what
each backward sends and launches is counted. With `--by-wire` tritonddp's ways to send fewer bytes
are measured beside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base.ranks import Ranks
from benchmarks.base.results import Result
from benchmarks.models.cases import Case
from benchmarks.models.configurations import UNWRAPPED, families, wires
from benchmarks.models.gradients import check
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.comparison import Bound, Comparison, overhead
from benchmarks.step.plan import Plan, parser, run
from benchmarks.step.rounds import Rounds
from benchmarks.step.traffic import Traffic


def main() -> int:
    arguments = parser(__doc__, rounds=12)
    arguments.add_argument("--by-wire", action="store_true", help="measure fewer bytes beside")
    arguments.add_argument(
        "--compared-only", action="store_true", help="leave out what is only shown beside"
    )
    options = arguments.parse_args()
    more = {"by_wire": options.by_wire, "compared_only": options.compared_only}
    return run("step", options, partial(measure, **more), show)[0]


def measure(
    case: Case, ranks: Ranks, plan: Plan, end: float, by_wire: bool, compared_only: bool
) -> dict[str, Any]:
    """Check, time and count all configurations on one model until ``end``; what JSON says."""
    groups = families(case.unused)
    if compared_only:
        groups = tuple(replace(group, beside=()) for group in groups)
    configurations = [UNWRAPPED, *(member for family in groups for member in family.members)]
    if by_wire:
        configurations += [family.ours for family in wires()[1:]]
    errors = {each.name: each.error for each in configurations}
    rounds = Rounds(case, configurations, ranks, plan, end)
    agreement: dict[str, Any] = {}
    traffic: dict[str, Traffic] = {}
    for build, models in enumerate(rounds.builds()):
        if build == 0:
            first = groups[0]
            reference, again = first.stock[0].name, first.again.name
            agreement = check(models, case, ranks, reference, again, plan.size, errors)
        rounds.run(models)
        if build == 0:
            traffic = {
                each.name: Traffic.of(models[each.name], rounds.batch(0), ranks)
                for each in configurations
            }
    seconds, steps, content = rounds.gathered()
    # Stock looks for unused parameters in the forward: there its backward is not the whole price.
    compared = steps if case.unused else seconds
    bound = Bound.of(case, ranks)
    names = [each.name for each in configurations]
    return {
        "gradients": {name: asdict(each) for name, each in agreement.items()},
        "overhead_seconds": {name: overhead(steps, name) for name in names[1:]},
        "wire_bytes": {name: traffic[name].wire_bytes for name in names},
        "sent_bytes": {name: traffic[name].sent_bytes for name in names},
        "collectives": {name: traffic[name].collectives for name in names},
        "launches": {name: traffic[name].launches for name in names},
        "comparisons": {
            family.name: {
                "of": "whole steps" if case.unused else "backwards",
                **Comparison.of(family, compared, steps).judged(bound),
            }
            for family in groups
        },
        **content,
    }


def show(step: Result) -> Iterator[str]:
    """Lines that show the results of some models."""
    for name, model in step.models.items():
        if model.gradients:
            worst = max(each["error"] for each in model.gradients.values())
            same = all(each["same_bits"] for each in model.gradients.values())
            how = "bit-equal to stock's" if same else f"off stock's by {worst:.1e} of their norm"
            yield f"{name}: gradients {how}, the same on all ranks; {model.rounds} rounds"
    yield from text([*tables.configurations(step), *tables.comparisons(step)])
    for _, _, one in step.compared:
        builds = " ".join(f"{ratio:.3f}" for ratio in one.by_build or ())
        low, high = one.overhead_interval or (0, 0)
        over = f"overhead ratio {one.overhead:.2f} [{low:.2f} {high:.2f}]"
        yield f"  {one.gradients}: {one.of} by build {builds}; {over}"


if __name__ == "__main__":
    sys.exit(main())
