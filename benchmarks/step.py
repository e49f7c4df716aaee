"""Backward time of stock DDP, tritonddp and the unwrapped model, in interleaved rounds.

    torchrun --standalone --nproc-per-node 2 benchmarks/step.py [--models mlp ...] [--by-wire]
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
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine
from comparison import Bound, Comparison, overhead
from configurations import UNWRAPPED, families, wires
from gradients import WrongGradients, check
from models import Case
from plan import Plan, parser
from ranks import Ranks, process_group
from rounds import Rounds, added, counted, flat, gather, slowest
from traffic import Traffic

from tritonddp.cli.kernel_timing.paired import Ratio, Spread


def main() -> int:
    arguments = parser(__doc__.split("\n", 1)[0], rounds=12)
    arguments.add_argument("--by-wire", action="store_true", help="measure fewer bytes beside")
    arguments.add_argument(
        "--compared-only", action="store_true", help="leave out what is only shown beside"
    )
    options = arguments.parse_args()
    plan = Plan.of(options)
    results: dict[str, Any] = {}
    with process_group(options.backend) as ranks:
        facts = machine.describe()
        if ranks.rank == 0:
            print(machine.summary(facts))
            print(plan.summary(ranks), flush=True)
        for case, end in plan.cases(ranks):
            try:
                results[case.name] = measure(
                    case, ranks, plan, options.by_wire, options.compared_only, end
                )
            except WrongGradients as error:  # on all ranks: the next model can be measured
                results[case.name] = {"error": str(error)}
            if ranks.rank == 0:
                print("\n".join(table(case.name, results[case.name])), flush=True)
                if options.out is not None:  # after each model: whatever cuts the run off
                    content = {
                        "benchmark": "step",
                        "machine": facts,
                        "load_average_after": machine.describe()["load_average"],
                        **plan.content(ranks),
                        "models": results,
                    }
                    machine.write_json(options.out, content)
        if ranks.rank == 0 and options.out is not None:
            print(f"\nwritten to {options.out}")
    return 1 if any("error" in result for result in results.values()) else 0


def measure(
    case: Case, ranks: Ranks, plan: Plan, by_wire: bool, compared_only: bool, end: float
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
    forward, backward = gather(rounds.forward, ranks), gather(rounds.backward, ranks)
    seconds = slowest(backward)
    steps = added(slowest(forward), seconds)
    # Stock looks for unused parameters in the forward: there its backward is not the whole price.
    compared = steps if case.unused else seconds
    bound = Bound.of(case, ranks)
    names = [each.name for each in configurations]
    return {
        "gradients": {name: asdict(each) for name, each in agreement.items()},
        "rounds": counted(seconds),  # of each build
        "seconds": {name: asdict(Spread.of(flat(seconds[name]))) for name in names},
        "step_seconds": {name: asdict(Spread.of(flat(steps[name]))) for name in names},
        "overhead_seconds": {name: overhead(steps, name) for name in names[1:]},
        "wire_bytes": {name: traffic[name].wire_bytes for name in names},
        "sent_bytes": {name: traffic[name].sent_bytes for name in names},
        "collectives": {name: traffic[name].collectives for name in names},
        "launches": {name: traffic[name].launches for name in names},
        "comparisons": {
            family.name: {
                "of": "whole steps" if case.unused else "backwards",
                **judged(Comparison.of(family, compared, steps), bound),
            }
            for family in groups
        },
        # rank, configuration, build, round
        "raw_seconds_per_rank": backward,
        "raw_forward_seconds_per_rank": forward,
    }


def judged(comparison: Comparison, bound: Bound | None) -> dict[str, Any]:
    """What JSON says about a comparison; without a bound it is not judged."""
    return {
        **asdict(comparison),
        "overhead": comparison.overhead.median,
        "overhead_interval": [comparison.overhead.low, comparison.overhead.high],
        "bound": bound and bound.limit,
        "bound_on": bound and bound.quantity,
        "allowed": bound and comparison.allowed(bound),
        "verdict": bound and comparison.verdict(bound),
    }


def table(name: str, result: dict[str, Any]) -> Iterator[str]:
    """Lines that show a model's result; times in milliseconds."""
    if "error" in result:
        yield f"\n{result['error']}"
        return
    agreement = result["gradients"].values()
    if all(each["same_bits"] for each in agreement):
        gradients = "gradients bit-equal to stock's"
    else:
        worst = max(each["error"] for each in agreement)
        gradients = f"gradients equal to stock's within {worst:.1e} of their norm"
    counted = any(launches is not None for launches in result["launches"].values())
    yield (
        f"\n{name}: {gradients}, the same on all ranks; "
        f"{' + '.join(map(str, result['rounds']))} rounds"
    )
    yield (
        f"  {'':28}{'backward, ms':>16}{'':12}{'above':>11}{'on the':>9}{'':9}{'collec-':>9}"
        + (f"{'':>10}" if counted else "")
    )
    yield (
        f"  {'':28}{'median':>9}{'quartiles':>19}{'unwrapped':>11}{'wire, MB':>9}"
        f"{'sent, MB':>9}{'tives':>9}" + (f"{'launches':>10}" if counted else "")
    )
    for label, spread in result["seconds"].items():
        extra = result["overhead_seconds"].get(label)
        quartiles = f"{spread['q1'] * 1e3:.2f} - {spread['q3'] * 1e3:.2f}"
        yield (
            f"  {label:28}{spread['median'] * 1e3:9.2f}{quartiles:>19}"
            + (f"{'':11}" if extra is None else f"{extra * 1e3:11.2f}")
            + f"{result['wire_bytes'][label] / 1e6:9.2f}{result['sent_bytes'][label] / 1e6:9.2f}"
            + f"{result['collectives'][label]:9d}"
            + (f"{result['launches'][label]:10d}" if counted else "")
        )
    for family, one in result["comparisons"].items():
        yield (
            f"  {family}, {one['of']}: ours / {one['best']!r} {Ratio(**one['ours'])}, "
            f"stock / itself {Ratio(**one['again'])}"
        )
        builds = " ".join(f"{ratio:.3f}" for ratio in one["by_build"])
        low, high = one["overhead_interval"]
        yield f"    by build {builds}; overhead ratio {one['overhead']:.2f} [{low:.2f} {high:.2f}]"
        yield f"    {verdict(one)}"


def verdict(comparison: dict[str, Any]) -> str:
    """A comparison's verdict in words."""
    if comparison["verdict"] is None:
        return "ranks take turns on one device: not judged"
    bound, allowed = f"{comparison['bound']} ({comparison['bound_on']})", comparison["allowed"]
    return {
        "met": f"at most {bound}",
        "within spread": f"above {bound}, within stock's own spread of {allowed:.3f}",
        "missed": f"ABOVE {bound}"
        + (f" and stock's own spread of {allowed:.3f}" if allowed > comparison["bound"] else ""),
        "too noisy": f"TOO NOISY to say whether it is at most {bound}",
    }[comparison["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
