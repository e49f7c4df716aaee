"""Everything that needs a GPU, in one command of under ten minutes: `make gpu`.

    python benchmarks/gpu/gpu.py [--out FOLDER] [--only PART ...] [--rehearse]

Each part is a process, or one a rank, with a time limit, in the order of what a user came for: the
machine, a minute of tests of what all else needs, free-running training steps beside stock's (and
with the exchange of 8 ranks SIMULATED, or on 2, 4 and 8 cards if there are so many), the host, two
ranks on one card, kernels, and the rest of the tests. A part that fails, hangs or crashes is ended
with all it started, and the others go on. Time that a part leaves is the next one's. Each part's
result is written as soon as it ends, to a file of its own and to that of all, so that whatever cuts
the run off leaves what was measured. Plots come last, and a summary:
step times first, then how each part ended.

``--only step`` runs all parts that measure steps.

Tests need pytest, and kernels pytest-benchmark too; the rest only torch and Triton. Nothing is
downloaded.

``--rehearse`` runs all of it, small, on the recorded device (``tests/recording``), where there is
no GPU: what cannot run on a GPU for a mistake in Python fails there too. Its figures mean nothing.

The exit status is 0 if no test and no part failed, whatever was measured; what cannot run here
(NCCL takes no second rank on a card) is reported and is no failure, but for
a rehearsal.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import deadline, processes
from benchmarks.base.results import Result
from benchmarks.gpu import one_card
from benchmarks.gpu.parts import PROBE, REHEARSING, WORLDS, Outcome, Part, parts
from benchmarks.report import tables
from benchmarks.report.table import Blocks, text

BENCHMARKS = Path(__file__).parents[1]
# Seconds from the start to the end of the last part, no less than the sum of all limits. What is
# left of ten minutes is for ending a part that had to be interrupted, and for the plots.
BUDGET = 540.0
PLOTS = 20.0
# Of a part's limit: benchmarks that take as many rounds as they have time for should end by then.
IN_TIME = 0.85

# By part, what its result is shown as.
_TABLES: dict[str, Callable[[Result], Blocks]] = {
    "step-training": tables.training,
    "step-simulated": tables.training,
    **{f"step-cards-{ranks}": tables.training for ranks in (2, 4, 8)},
}


class Report:
    """The result file, and the clock that all parts share."""

    def __init__(self, path: Path, facts: dict[str, Any], rehearsal: bool, end: float) -> None:
        self.path = path
        self.end = end
        self.later = 0.0  # seconds that the parts to come may take
        self.content: dict[str, Any] = {
            "benchmark": "gpu",
            "machine": facts,
            "rehearsal": rehearsal,  # without a GPU: no figure means anything
            "parts": {},
        }

    def run(self, part: Part) -> None:
        """Run a part and write down what came of it."""
        left = self.end - time.monotonic() - self.later
        limit = max(0.0, min((6 if self.content["rehearsal"] else 2) * part.limit, left))
        print(f"\n--- {part.name}: {part.title} (at most {limit:.0f} s)", flush=True)
        start = time.monotonic()
        try:
            outcome = _outcome(part, limit)
        except Exception as error:  # in reading a result: the other parts are worth more than it
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        self.add(part, outcome, time.monotonic() - start)

    def add(self, part: Part, outcome: Outcome, seconds: float) -> None:
        """Write down what came of a part, and say it."""
        self.content["parts"][part.name] = {
            "title": part.title,
            "status": outcome.status,
            "reason": outcome.reason,
            "seconds": round(seconds, 1),
            "limit": part.limit,
            "estimate": part.estimate,
            "result": outcome.result,
            "log": outcome.log,
        }
        _write(self.path, self.content)
        if outcome.result is not None:
            _write(self.path.parent / "parts" / f"{part.name}.json", outcome.result)
        why = f": {outcome.reason}" if outcome.reason else ""
        print(f"--- {part.name}: {outcome.status}{why} ({seconds:.1f} s)", flush=True)


def _write(path: Path, content: Any) -> None:
    from benchmarks.base.machine import (
        write_json,
    )  # needs torch, which _facts has shown to be there

    write_json(path, content)


# Imports torch, Triton and the package, and asks the device what it is.
DESCRIBE = Part(
    *("describe", "the machine", 21, 8),
    command=(sys.executable, str(BENCHMARKS / "base" / "machine.py")),
)


def main() -> int:
    options = _options()
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # so that started processes end too
    _prepare_environment(options.rehearse)
    facts = _facts(DESCRIBE.rehearsed() if options.rehearse else DESCRIBE)
    why = "torch and tritonddp cannot be imported" if facts is None else None
    if facts is not None and facts["gpu"] is None:
        why = "torch sees no CUDA device"
    if facts is None or why is not None:
        print(f"make gpu: nothing was run: {why} ({sys.executable})", file=sys.stderr)
        return 2
    path = _result_path(options.out, facts, options.rehearse)
    # A rehearsal is no race: it may share its cores with other tests.
    patience = 4 if options.rehearse else 1
    report = Report(path, facts, options.rehearse, start + patience * options.budget)
    report.add(DESCRIBE, Outcome("ok"), time.monotonic() - start)
    plan = [
        part
        for part in parts(options.rehearse, facts["gpu"]["count"])
        if any(is_asked_for(part.name, name) for name in options.only or [part.name])
    ]
    try:
        for number, part in enumerate(plan):
            report.later = sum(each.limit for each in plan[number + 1 :])
            report.run(part)
        _draw(report.path)
    finally:  # also when the run is cut off
        print("\n" + "\n".join(summary(report.content)))
        print(f"written to {report.path}", flush=True)
    # In a rehearsal nothing is missing but the GPU.
    fine = ("ok",) if options.rehearse else ("ok", "not run")
    return int(any(part["status"] not in fine for part in report.content["parts"].values()))


def summary(content: Mapping[str, Any]) -> Iterator[str]:
    """The lines, from what a result file says."""
    if content["rehearsal"]:
        yield "REHEARSAL without a GPU: NO FIGURE BELOW MEANS ANYTHING; estimates are of an H200."
    for name, show in _TABLES.items():
        found = Result(content).part(name)
        if found is not None:
            yield from _shown(show, found)
    yield from _shown(tables.gpu_steps, Result(content))
    yield from _parts(content["parts"])


def _shown(show: Callable[[Result], Blocks], result: Result) -> Iterator[str]:
    try:
        yield from [*text(show(result)), ""]
    except Exception as error:  # a result of another form: nothing may stop the summary
        yield f"no table: {type(error).__name__}: {error}"


def _parts(parts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'part':16}{'':10}{'seconds':>8}{'limit':>7}{'estimate':>10}"
    for name, part in parts.items():
        times = f"{part['seconds']:8.1f}{part['limit']:7.0f}{part['estimate']:10.0f}"
        why = "; ".join([*filter(None, [part["reason"]]), *_groups_in_words(part["result"])])
        yield _line(f"{name:16}{part['status']:10}{times}  {why}")
        if part["status"] == "failed" and isinstance(part["result"], dict):
            for failure in part["result"].get("failed", [])[:10]:
                yield _line(f"{'':16}FAILED {failure}")
    times = [sum(part[key] for part in parts.values()) for key in ("seconds", "limit", "estimate")]
    yield f"{'all':16}{'':10}{times[0]:8.1f}{times[1]:7.0f}{times[2]:10.0f}"


def _line(line: str) -> str:
    return line[:160].rstrip()


def _groups_in_words(result: Any) -> list[str]:
    """What tests say of each world, or of each file."""
    if not isinstance(result, dict) or "skipped" not in result:
        return []
    whys = {group: next(iter(each)) for group, each in result["skipped"].items()}
    return [f"{group} {_counts(each, whys.get(group))}" for group, each in result["groups"].items()]


def _counts(counts: Mapping[str, int], why: str | None) -> str:
    skipped = counts.get("skipped", 0)
    ran = [f"{counts[kind]} {kind}" for kind in ("passed", "failed") if counts.get(kind)]
    return ", ".join([*ran, *([f"{skipped} not run: {why}"] if skipped else [])])


def is_asked_for(part: str, name: str) -> bool:
    """Whether a part is called so, or belongs to the parts of this name: step to all steps."""
    return part == name or part.startswith(f"{name}-")


def _outcome(part: Part, limit: float) -> Outcome:
    if limit < 5:
        return Outcome("not run", "no time was left")
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome("not run", f"{', '.join(missing)} is not installed")
    if part.on_one_card:  # tried by the part "probe", or now
        why = one_card.refusal(min(limit, PROBE.limit))
        if why is not None:
            return Outcome("not run", why)
    end = time.monotonic() + IN_TIME * min(limit, part.limit)
    environment = {deadline.VARIABLE: str(end)}
    with tempfile.TemporaryDirectory(prefix="tritonddp-gpu-") as folder:
        result = Path(folder) / "result"
        command = [each.replace("{result}", str(result)) for each in part.command]
        codes, text = processes.read(command, limit, ranks=part.ranks, environment=environment)
        return part.read(result, codes, text, limit)


def _facts(part: Part) -> dict[str, Any] | None:
    """What machine.py says, in a process of its own: a sick device may hang whoever asks it.

    ``None`` if torch cannot be imported, or does not answer in time.
    """
    codes, text = processes.read(part.command, 2 * part.limit, aloud=False)
    if codes != [0]:
        print(text, file=sys.stderr)
        return None
    facts = json.loads(text.splitlines()[-1])
    print(text.rpartition("\n{")[0], flush=True)
    return facts


def _prepare_environment(rehearse: bool) -> None:
    """For all processes of all parts."""
    paths = [str(BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYTHONUNBUFFERED"] = "1"  # what hangs has said where it was
    # All ranks are here, and a machine without a network has no other interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.pop("TRITON_INTERPRET", None)
    if rehearse:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ[REHEARSING] = "1"
        os.environ.setdefault(one_card.ANSWER, "")  # where the part "probe" is not asked for


def _draw(result: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("\nno tables and plots: matplotlib is not installed")
        return
    script = str(BENCHMARKS / "report" / "report.py")
    command = [sys.executable, script, "--folder", str(result.parent)]
    codes, _ = processes.read(command, PLOTS)
    if codes != [0]:
        print(f"\nno tables and plots: {codes}", flush=True)


def _result_path(folder: Path | None, facts: dict[str, Any], rehearsal: bool) -> Path:
    """``<folder>/<name of the GPU>/gpu.json``."""
    if folder is None:
        folder = BENCHMARKS / "results"
        if rehearsal:
            folder = Path(tempfile.mkdtemp(prefix="tritonddp-rehearsal-"))
    name = "rehearsal" if rehearsal else facts["gpu"]["name"]
    return folder / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") / "gpu.json"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    names = [part.name for part in parts(rehearse=True)]
    names += [f"step-cards-{ranks}" for ranks in [*WORLDS][1:]]
    parser.add_argument(
        "--out",
        type=Path,
        default=os.environ.get("OUT"),
        help="folder for <gpu>/gpu.json and the plots (default: $OUT, else benchmarks/results)",
    )
    what = f"of {', '.join(names)}; step and test: all parts whose names begin so"
    choices = [*names, "test"]
    parser.add_argument("--only", nargs="+", choices=choices, metavar="PART", help=what)
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help=f"seconds for all parts ({BUDGET:.0f})"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="all of it, small, on a device that is none"
    )
    options = parser.parse_args()
    if options.out is not None:
        options.out = Path(options.out).resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
