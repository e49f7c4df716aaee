"""All benchmarks that a machine without a GPU can run, in under ten minutes: `make bench`.

    python benchmarks/bench.py [--only PART ...] [--seconds N] [--out FOLDER]

Writes ``benchmarks/results/local/``: results, tables and plots. The results and figures that
are committed stay as they are (see report.py for how to change them). Each part gets a share of the
time and takes as many rounds as fit, so a slow machine takes fewer; how many it took stands in the
table of verdicts that comes last.

The exit status is 0 if all parts ran to their end, whatever was measured, and 1 if one failed. One
that cannot run here (network.py, unless as root) is reported and is no failure.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this tree, whatever is installed

from benchmarks.base import deadline, processes
from benchmarks.base.results import Result
from benchmarks.report import verdicts
from benchmarks.report.table import Table, text

HERE = Path(__file__).parent
LOCAL = HERE / "results" / "local"
SECONDS = 550.0  # until the deadline of the last part; it may be late by a few rounds
LEAST_SECONDS = 30.0  # for the least that a part does: starting, checking, a few rounds
CANNOT_RUN = 2  # the exit status of a benchmark that lacks what it needs
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # what a GPU does is for make gpu
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # no host name needs to resolve
    "KINETO_LOG_LEVEL": "99",  # the profiler's own messages
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Part:
    """One process, or one a rank.

    Attributes:
        command: what python is to run, with ``{here}`` for this folder and ``{out}`` for that of
            results.
    """

    name: str  # on the command line, and of the result file
    seconds: float  # of the time that all parts have together; a share of another time
    command: str
    ranks: int | None = None  # how many, for a script that wants to be started by torchrun


def _script(name: str, seconds: float, command: str, ranks: int | None = None) -> Part:
    out = f"{{out}}/{name}.json"
    return Part(name, seconds, f"{{here}}/{command} --out {out}", ranks)


# Few models, so that their rounds suffice for a verdict: one for each kind of cost. The other ones
# are between these. A line slower than 1 Gbit/s shows the same as that, but in seconds a step.
_MODELS = "--models branchy many_small transformer many_large"
_LINES = "--hosts 2 --rates 1gbit none"
# An error of collection is to be one of a test, as pytest's other exit status means something else.
_PYTEST = "-m pytest -q -p no:cacheprovider --continue-on-collection-errors {here}/kernels"
_KERNELS = (
    "--benchmark-only --benchmark-columns=median,iqr,rounds -k 'many_small or (resnet50 and 25MiB)'"
)
_ROUNDS = "--builds 3 --rounds 100"
PARTS = (
    _script("step", 337, f"step/step.py {_MODELS} {_ROUNDS}", ranks=2),
    _script("network", 65, f"network/network.py {_LINES} --rounds 100 --seconds 600"),
    _script("memory", 45, "step/memory.py --models transformer branchy", ranks=2),
    Part("kernels", 30, f"{_PYTEST} {_KERNELS} --benchmark-json={{out}}/kernels.json"),
    _script("host", 45, "host/host.py --rounds 75"),
    Part("report", 28, "{here}/report/report.py --folder {out}"),
)


def main() -> int:
    options = _options()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # so that started processes end too
    parts = [part for part in PARTS if part.name in options.only]
    end = time.monotonic() + options.seconds
    outcomes: dict[str, str] = {}
    try:
        for index, part in enumerate(parts):
            left = sum(each.seconds for each in parts[index:])
            outcomes[part.name] = "failed: cut off with the whole run"  # unless it ends
            outcomes[part.name] = run(part, deadline.until(end, part.seconds / left), out)
    finally:  # also when the run is cut off
        print("\n".join(["", *summary(outcomes, out)]), flush=True)
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


def run(part: Part, end: float, out: Path) -> str:
    """Run a part, which knows that it should be done at ``end``; what came of it, in a line.

    It passes on what the part prints, and ends it where it hangs.
    """
    seconds = max(0.0, end - time.monotonic())
    print(f"\n--- {part.name} ({seconds:.0f} s)", flush=True)
    result = out / f"{part.name}.json"
    result.unlink(missing_ok=True)  # that of an earlier run is not to pass for this one's
    start = time.monotonic()
    command = [
        each.replace("{here}", str(HERE)).replace("{out}", str(out))
        for each in shlex.split(part.command)
    ]
    # The least that a part does may take longer than it has. What takes even longer hangs.
    codes, text = processes.read(
        [sys.executable, *command],
        1.5 * seconds + LEAST_SECONDS,
        ranks=part.ranks,
        environment={**ENVIRONMENT, deadline.VARIABLE: str(end)},
    )
    last = (text.strip() or "it said nothing").splitlines()[-1].strip()
    took = f"{time.monotonic() - start:.0f} s"
    if not any(codes) and None not in codes:
        return f"ok, {took}"
    if codes == [CANNOT_RUN]:
        return f"not run: {last}"
    if set(codes) <= {0, None}:
        return f"failed: cut off after {took}; what it had written is kept"
    return f"failed: exit status {next(code for code in codes if code)}, see above: {last}"


def summary(outcomes: Mapping[str, str], out: Path) -> Iterator[str]:
    """What came of each part, and the verdicts of what it has measured."""
    for name, outcome in outcomes.items():
        yield f"{name:10} {outcome}"
    found = {name: _result(out / f"{name}.json") for name in outcomes}
    results = {name: result for name, result in found.items() if result is not None}
    table = list(verdicts.rows(results))
    if table:
        yield from ("", *text([Table(verdicts.HEADER, table)]))
        counts = Counter(row[-2].strip("*") for row in table)
        yield ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    yield ""
    yield f"Written to {out}; the committed results and figures are as they were."
    if out == LOCAL:
        yield "make figures FROM=local takes these results over."


def _result(path: Path) -> Result | None:
    """A result file; ``None`` if there is none, or only half of one."""
    try:
        return Result(json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for all parts (default %(default)g)"
    )
    parser.add_argument("--out", type=Path, default=LOCAL, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
