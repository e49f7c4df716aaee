"""Backward time of the tree's tritonddp against that of an earlier revision, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/step/compare.py
        --base HEAD~1 [--models mlp ...]

    make bench-compare BASE=HEAD~1

The revision is imported as a second package into the same processes, so that both wrap the same
models and take turns in the same rounds (see step.py). The tree is there twice: a difference
counts only if its interval lies on one side of 1, and its median beyond what the tree shows
against itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import tritonddp
from benchmarks.base.paired import Ratio, paired_ratio
from benchmarks.base.ranks import Ranks
from benchmarks.base.results import Result
from benchmarks.models.cases import Case
from benchmarks.models.configurations import MODES, UNWRAPPED, Configuration
from benchmarks.models.gradients import check
from benchmarks.report.table import Table, ms, quartiles, text
from benchmarks.step import revision
from benchmarks.step.plan import Plan, parser, run
from benchmarks.step.rounds import Rounds, Seconds, flat

ALIKE = ("tree copies", "tree again copies")


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
    with tempfile.TemporaryDirectory(prefix="tritonddp-base-") as folder:
        try:
            commit = revision.resolve(options.base)
            base = revision.load(commit, Path(folder))
        except revision.RevisionError as error:
            # From each rank: torchrun ends the others as soon as one has failed.
            print(f"benchmarks/step/compare.py: {error}", file=sys.stderr, flush=True)
            return 2
        found = {"revision": options.base, "commit": commit}
        status, models = run("compare", options, partial(measure, base), show, base=found)
    if os.environ["RANK"] == "0":
        print("\n".join(["", f"base: {options.base} = {commit[:10]}", *summary(models)]))
    return status


def measure(base: ModuleType, case: Case, ranks: Ranks, plan: Plan, end: float) -> dict[str, Any]:
    """Check and time both packages on one model; what JSON says about it."""
    configurations = [UNWRAPPED]
    for mode, options in MODES.items():
        for name, package in (("tree", tritonddp), ("tree again", tritonddp), ("base", base)):
            wrapper = package.DistributedDataParallel
            configurations.append(Configuration(f"{name} {mode}", wrapper, options))
    rounds = Rounds(case, configurations, ranks, plan, end)
    agreement: dict[str, Any] = {}
    for build, models in enumerate(rounds.builds()):
        if build == 0:
            agreement = check(models, case, ranks, "base copies", ALIKE, plan.size)
        rounds.run(models)
    # Whole steps: what a change moves from one part into the other is no gain.
    _, steps, content = rounds.gathered()
    differences = {mode: Difference.of(mode, steps) for mode in MODES}
    return {
        "gradients": {name: asdict(each) for name, each in agreement.items()},
        "comparisons": {
            mode: {**asdict(each), "verdict": each.verdict} for mode, each in differences.items()
        },
        **content,
    }


def show(result: Result) -> Iterator[str]:
    """Lines that show the results of some models; forward and backward, in ms."""
    for name, model in result.models.items():
        if model.error:
            yield model.error
            continue
        rows = [(label, ms(s.median), quartiles(s)) for label, s in model.step_seconds.items()]
        yield from text([Table((f"{name}, step, ms", "median", "quartiles"), rows)])
        for mode, one in result.content["models"][name]["comparisons"].items():
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
    arguments = parser(__doc__, rounds=20)
    arguments.add_argument("--base", required=True, help="git revision to compare the tree with")
    return arguments.parse_args()


if __name__ == "__main__":
    sys.exit(main())
