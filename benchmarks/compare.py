"""Backward time of the tree's tritonddp against that of an earlier revision, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/compare.py --base HEAD~1 [--models mlp ...]

    make bench-compare BASE=HEAD~1

The revision is imported as a second package into the same processes, so that both wrap the same
models and take turns in the same rounds (see step.py). The tree is there twice: a difference
counts only if its interval lies on one side of 1, and its median beyond what the tree shows
against itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this tree, whatever is installed

import machine
import revision
from configurations import UNWRAPPED, Configuration
from gradients import WrongGradients, check
from models import Case
from plan import Plan, parser
from ranks import Ranks, process_group
from rounds import Rounds, Seconds, added, flat, gather, slowest

import tritonddp
from tritonddp.cli.kernel_timing.paired import Ratio, Spread, paired_ratio

MODES = {"copies": {}, "views": {"gradient_as_bucket_view": True}}


@dataclass(frozen=True)
class Difference:
    """The tree against the base, in one mode.

    Attributes:
        tree: tree / base.
        by_build: its median in each build.
        again: tree / the tree once more; what the comparison cannot resolve.
    """

    tree: Ratio
    by_build: list[float]
    again: Ratio

    @classmethod
    def of(cls, mode: str, seconds: Seconds) -> Difference:
        tree, base, again = (seconds[f"{name} {mode}"] for name in ("tree", "base", "tree again"))
        return cls(
            tree=paired_ratio(flat(tree), flat(base)),
            by_build=[paired_ratio(*pair).median for pair in zip(tree, base, strict=True)],
            again=paired_ratio(flat(again), flat(tree)),
        )

    @property
    def verdict(self) -> str:
        """``"slower"``, ``"faster"`` or ``"no difference"`` that exceeds the noise."""
        if self.tree.low > 1 and self.tree.median > self.again.away:
            return "slower"
        if self.tree.high < 1 and self.tree.median < 1 / self.again.away:
            return "faster"
        return "no difference"


def main() -> int:
    options = _options()
    plan = Plan.of(options)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tritonddp-base-") as folder:
        try:
            commit = revision.resolve(options.base)
            base = revision.load(commit, Path(folder))
        except revision.RevisionError as error:
            # From each rank: torchrun ends the others as soon as one has failed.
            print(f"benchmarks/compare.py: {error}", file=sys.stderr, flush=True)
            return 2
        with process_group(options.backend) as ranks:
            facts = machine.describe()
            if ranks.rank == 0:
                print(machine.summary(facts))
                print(plan.summary(ranks))
                print(f"base: {options.base} = {commit[:10]}", flush=True)
            for case, end in plan.cases(ranks):
                try:
                    results[case.name] = measure(case, base, ranks, plan, end)
                except WrongGradients as error:  # on all ranks: the next model can be measured
                    results[case.name] = {"error": str(error)}
                if ranks.rank == 0:
                    print("\n".join(table(case.name, results[case.name])), flush=True)
            if ranks.rank == 0:
                print("\n".join(["", *summary(results)]))
                if options.out is not None:
                    content = {
                        "benchmark": "compare",
                        "machine": facts,
                        "load_average_after": machine.describe()["load_average"],
                        "base": {"revision": options.base, "commit": commit},
                        **plan.content(ranks),
                        "models": results,
                    }
                    machine.write_json(options.out, content)
                    print(f"written to {options.out}")
    return 1 if any("error" in result for result in results.values()) else 0


def measure(case: Case, base: ModuleType, ranks: Ranks, plan: Plan, end: float) -> dict[str, Any]:
    """Check and time both packages on one model; what JSON says about it."""
    configurations = [UNWRAPPED]
    for mode, options in MODES.items():
        for name, package in (("tree", tritonddp), ("tree again", tritonddp), ("base", base)):
            wrapper = package.DistributedDataParallel
            configurations.append(Configuration(f"{name} {mode}", wrapper, options))
    names = [each.name for each in configurations]
    rounds = Rounds(case, configurations, ranks, plan, end)
    agreement: dict[str, Any] = {}
    for build, models in enumerate(rounds.builds()):
        if build == 0:
            agreement = check(models, case, ranks, "base copies", "tree copies", plan.size)
        rounds.run(models)
    forward, backward = gather(rounds.forward, ranks), gather(rounds.backward, ranks)
    # Whole steps: what a change moves from one part into the other is no gain.
    seconds = added(slowest(forward), slowest(backward))
    differences = {mode: Difference.of(mode, seconds) for mode in MODES}
    return {
        "gradients": {name: asdict(each) for name, each in agreement.items()},
        "seconds": {name: asdict(Spread.of(flat(seconds[name]))) for name in names},
        "comparisons": {
            mode: {**asdict(each), "verdict": each.verdict} for mode, each in differences.items()
        },
        # rank, configuration, build, round
        "raw_seconds_per_rank": backward,
        "raw_forward_seconds_per_rank": forward,
    }


def table(name: str, result: dict[str, Any]) -> Iterator[str]:
    """Lines that show a model's result; times in milliseconds."""
    if "error" in result:
        yield f"\n{result['error']}"
        return
    yield f"\n{name}"
    yield f"  {'forward and backward, ms':26}{'median':>9}{'quartiles':>19}"
    for label, spread in result["seconds"].items():
        quartiles = f"{spread['q1'] * 1e3:.2f} - {spread['q3'] * 1e3:.2f}"
        yield f"  {label:26}{spread['median'] * 1e3:9.2f}{quartiles:>19}"
    for mode, one in result["comparisons"].items():
        builds = " ".join(f"{ratio:.3f}" for ratio in one["by_build"])
        yield (
            f"  {mode}: tree / base {Ratio(**one['tree'])} (by build {builds}), "
            f"tree / itself {Ratio(**one['again'])}: {one['verdict']}"
        )


def summary(results: dict[str, Any]) -> Iterator[str]:
    """What exceeds the noise, and what does not, in one line each."""
    found: dict[str, list[str]] = {"slower": [], "faster": [], "no difference": []}
    for name, result in results.items():
        for mode, one in result.get("comparisons", {}).items():
            found[one["verdict"]].append(f"{name} {mode} {one['tree']['median']:.3f}")
    yield f"slower than the base: {', '.join(found['slower']) or 'none'}"
    yield f"faster than the base: {', '.join(found['faster']) or 'none'}"
    yield f"no difference that exceeds the noise: {', '.join(found['no difference']) or 'none'}"


def _options() -> argparse.Namespace:
    arguments = parser(__doc__.split("\n", 1)[0], rounds=20)
    arguments.add_argument("--base", required=True, help="git revision to compare the tree with")
    return arguments.parse_args()


if __name__ == "__main__":
    sys.exit(main())
