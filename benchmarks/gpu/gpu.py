"""Everything that needs a GPU, in one command of under ten minutes: `make gpu`.

    python benchmarks/gpu/gpu.py [--out FOLDER] [--only PART ...] [--rehearse]

Each part is a process, or one process per rank, with a time limit. The most interesting parts come
first: the machine, a minute of basic tests, free-running training steps compared with stock (also
with a SIMULATED exchange of 8 ranks, or on 2, 4 and 8 GPUs if there are so many), the host, two
ranks on one GPU, kernels, and the remaining tests. A part that fails, hangs or crashes is ended
with all processes that it started, and the other parts run. Unused time of a part goes to the next
part. The result of each part is written as soon as it ends, to a separate file and to the combined
file, so an interrupted run keeps its measurements. Plots come last, and a summary: step times
first, then the outcome of each part.

``--only step`` runs all parts that measure steps.

Tests need pytest, and kernels also pytest-benchmark; the rest needs only torch and Triton. Nothing
is downloaded.

``--rehearse`` runs everything with small sizes on the recorded device (``tests/recording``),
without a GPU. It finds the Python errors that would occur on a GPU. Its figures mean nothing.

The exit status is 0 if no test and no part failed, regardless of the results. A part that cannot
run here (for example because NCCL rejects two ranks on one GPU) is reported, and counts as a
failure only in a rehearsal.
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

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

from benchmarks.base import deadline, processes
from benchmarks.base.results import Result
from benchmarks.gpu import one_card
from benchmarks.gpu.parts import PROBE, REHEARSING, WORLDS, Outcome, Part, parts
from benchmarks.report import tables
from benchmarks.report.table import Blocks, text

BENCHMARKS = Path(__file__).parents[1]
# Seconds from the start to the end of the last part; at least the sum of all limits. The rest of
# ten minutes is for ending a part that had to be interrupted, and for the plots.
BUDGET = 540.0
PLOTS = 20.0
# Share of a part's limit after which benchmarks should start no more rounds.
IN_TIME = 0.85

# The table for the result of each part.
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
        self.later = 0.0  # sum of the limits of the parts that have not run yet, in seconds
        self.content: dict[str, Any] = {
            "benchmark": "gpu",
            "machine": facts,
            "rehearsal": rehearsal,  # without a GPU: figures mean nothing
            "parts": {},
        }

    def run(self, part: Part) -> None:
        """Run a part, and record its outcome."""
        left = self.end - time.monotonic() - self.later
        limit = max(0.0, min((6 if self.content["rehearsal"] else 2) * part.limit, left))
        print(f"\n--- {part.name}: {part.title} (at most {limit:.0f} s)", flush=True)
        start = time.monotonic()
        try:
            outcome = _outcome(part, limit)
        except Exception as error:  # an unreadable result must not stop the other parts
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        self.add(part, outcome, time.monotonic() - start)

    def add(self, part: Part, outcome: Outcome, seconds: float) -> None:
        """Record and print the outcome of a part."""
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
    )  # needs torch, which _facts has found

    write_json(path, content)


# Imports torch, Triton and the package, and queries the device.
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
    # A rehearsal may share its cores with other tests.
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
    finally:  # also after an interrupt
        print("\n" + "\n".join(summary(report.content)))
        print(f"written to {report.path}", flush=True)
    # A rehearsal has all requirements except the GPU.
    fine = ("ok",) if options.rehearse else ("ok", "not run")
    return int(any(part["status"] not in fine for part in report.content["parts"].values()))


def summary(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the summary of a result file."""
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
    except Exception as error:  # a result in an unexpected format must not stop the summary
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
    """Describe the test results of each world, or of each file."""
    if not isinstance(result, dict) or "skipped" not in result:
        return []
    whys = {group: next(iter(each)) for group, each in result["skipped"].items()}
    return [f"{group} {_counts(each, whys.get(group))}" for group, each in result["groups"].items()]


def _counts(counts: Mapping[str, int], why: str | None) -> str:
    skipped = counts.get("skipped", 0)
    ran = [f"{counts[kind]} {kind}" for kind in ("passed", "failed") if counts.get(kind)]
    return ", ".join([*ran, *([f"{skipped} not run: {why}"] if skipped else [])])


def is_asked_for(part: str, name: str) -> bool:
    """Return True if ``name`` is the part or its group: ``step`` means all parts with steps."""
    return part == name or part.startswith(f"{name}-")


def _outcome(part: Part, limit: float) -> Outcome:
    if limit < 5:
        return Outcome("not run", "no time was left")
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome("not run", f"{', '.join(missing)} is not installed")
    if part.on_one_card:  # determined by the part "probe", or now
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
    """Return the facts from machine.py, read in a separate process: a faulty device may hang it.

    Return ``None`` if torch cannot be imported or does not respond in time.
    """
    codes, text = processes.read(part.command, 2 * part.limit, aloud=False)
    if codes != [0]:
        print(text, file=sys.stderr)
        return None
    facts = json.loads(text.splitlines()[-1])
    print(text.rpartition("\n{")[0], flush=True)
    return facts


def _prepare_environment(rehearse: bool) -> None:
    """Set environment variables for all processes of all parts."""
    paths = [str(BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYTHONUNBUFFERED"] = "1"  # so that a part that hangs has printed its position
    # All ranks are on this host. Without a network, there is no other interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.pop("TRITON_INTERPRET", None)
    if rehearse:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ[REHEARSING] = "1"
        os.environ.setdefault(one_card.ANSWER, "")  # in case the part "probe" does not run


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
    """Return ``<folder>/<name of the GPU>/gpu.json``."""
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
    choices = [*names, "step", "test"]
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
