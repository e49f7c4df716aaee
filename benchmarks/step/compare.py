"""Backward time of the tree's tritonddp against that of an earlier revision, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/step/compare.py
        --base HEAD~1 [--models mlp ...]

    make bench-compare BASE=HEAD~1

The revision is imported as a second package into the same processes, so that both wrap the same
models and take turns in the same rounds (see step.py). The tree is measured twice. A difference
counts only if its interval is on one side of 1 and its median exceeds the difference between the
two measurements of the tree.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

import tritonddp
from benchmarks.base.paired import Ratio
from benchmarks.base.ranks import Ranks
from benchmarks.base.results import Result
from benchmarks.models.cases import Case
from benchmarks.models.configurations import MODES, Configuration, Families, Family
from benchmarks.report.table import Rows, ratio, text
from benchmarks.step import step
from benchmarks.step.plan import Plan, parser, run

ROOT = Path(__file__).parents[2]
PACKAGE, BASE = "tritonddp", "tritonddp_base"

_NAME = re.compile(rf"\b{PACKAGE}\b")


def main() -> int:
    arguments = parser(__doc__, rounds=20)
    arguments.add_argument("--base", required=True, help="git revision to compare the tree with")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="tritonddp-base-") as folder:
        try:
            commit = resolve(options.base)
            base = load(commit, Path(folder))
        except RevisionError as error:
            # On each rank, because torchrun ends the others as soon as one fails.
            print(f"benchmarks/step/compare.py: {error}", file=sys.stderr, flush=True)
            return 2
        found = {"revision": options.base, "commit": commit}
        measured = partial(measure, base)
        status, models = run("compare", options, measured, show, step.REFUSED, base=found)
    if os.environ["RANK"] == "0":
        print("\n".join(["", f"base: {options.base} = {commit[:10]}", *summary(models)]))
    return status


def measure(base: ModuleType, case: Case, ranks: Ranks, plan: Plan, end: float) -> dict[str, Any]:
    """Check and time both packages on one model, as step.py does with stock and ours."""
    found = step.measure(case, ranks, plan, end, lambda *_: families_of(base))
    for one in found["comparisons"].values():
        one["verdict"] = verdict(Ratio(**one["ours"]), Ratio(**one["again"]))
    return found


def families_of(base: ModuleType) -> Families:
    """Return families with the tree as ours, the base as stock, and the tree again."""
    found = []
    for mode, options in MODES.items():
        tree, again, former = (
            Configuration(f"{name} {mode}", package.DistributedDataParallel, options)
            for name, package in (("tree", tritonddp), ("tree again", tritonddp), ("base", base))
        )
        found.append(Family(mode, tree, (former,), (tree, again)))
    return tuple(found)


def verdict(tree: Ratio, again: Ratio) -> str:
    """Return ``"slower"``, ``"faster"`` or ``"no difference"`` that exceeds the noise.

    Args:
        tree: tree / base.
        again: tree / second measurement of the tree, which is the noise.
    """
    if tree.low > 1 and tree.median > again.away:
        return "slower"
    if tree.high < 1 and tree.median < 1 / again.away:
        return "faster"
    return "no difference"


_TABLE = Rows(
    lambda result: result.compared,
    (
        ("model", "name"),
        ("gradients", "gradients"),
        ("tree / base (95% interval)", lambda one: ratio(one.ours)),
        ("by build", lambda one: " ".join(f"{each:.3f}" for each in one.by_build)),
        ("tree / itself", lambda one: ratio(one.again)),
        ("verdict", "verdict"),
    ),
    lambda result: [each.error for each in result.models.values() if each.error],
)


def show(result: Result) -> Iterator[str]:
    """Yield lines that show the results of some models."""
    yield from text(_TABLE(result))


def summary(models: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for the differences above the noise, and one for those within it."""
    found: dict[str, list[str]] = {"slower": [], "faster": [], "no difference": []}
    for one in Result({"models": models}).compared:
        found[one.verdict].append(f"{one.name} {one.gradients} {one.ours.median:.3f}")
    yield f"slower than the base: {', '.join(found['slower']) or 'none'}"
    yield f"faster than the base: {', '.join(found['faster']) or 'none'}"
    yield f"no difference that exceeds the noise: {', '.join(found['no difference']) or 'none'}"


class RevisionError(Exception):
    """A revision cannot be found, or cannot be imported together with the tree."""


def resolve(revision: str, repository: Path = ROOT) -> str:
    """Return the full name of the commit.

    Raises:
        RevisionError: git is missing, or ``revision`` names no commit of the repository.
    """
    command = ["git", "-C", str(repository), "rev-parse", "--quiet", "--verify", "--end-of-options"]
    try:
        done = subprocess.run([*command, revision + "^{commit}"], capture_output=True, text=True)
    except OSError as error:
        raise RevisionError(f"git cannot be run: {error}") from None
    if done.returncode != 0:
        why = done.stderr.strip() or "try `git log --oneline`, or `git fetch` first"
        raise RevisionError(f"{revision!r} names no commit of {repository}: {why}")
    return done.stdout.strip()


def load(commit: str, folder: Path, repository: Path = ROOT) -> ModuleType:
    """Import ``commit``'s tritonddp as ``tritonddp_base``, from files written into ``folder``.

    Keep the folder while the package is used, because it imports some of its modules late.

    Raises:
        RevisionError: the commit has no tritonddp.
    """
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", commit, PACKAGE], capture_output=True
    )
    if archive.returncode != 0:
        raise RevisionError(f"{commit} has no {PACKAGE}/: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        # Python 3.11.3 and older have no filters. The archive is from git, so it is trusted.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        files.extractall(folder, **safely)
    target = folder / BASE
    (folder / PACKAGE).rename(target)
    for path in sorted(target.rglob("*.py")):
        path.write_text(_NAME.sub(BASE, path.read_text()))  # imports, operators, loggers, texts
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(BASE)
        found = module.DistributedDataParallel.__module__
    finally:
        sys.path.remove(str(folder))
    if not found.startswith(f"{BASE}."):
        raise RevisionError(f"{commit} has its class from {found}, which is the present tree's")
    return module


if __name__ == "__main__":
    sys.exit(main())
