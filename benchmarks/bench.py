"""All benchmarks that a machine without a GPU can run, in under ten minutes: `make bench`.

    python benchmarks/bench.py [--only PART ...] [--seconds N] [--out FOLDER]

Writes ``benchmarks/results/local/``: results, tables and plots. Committed results and figures are
not changed (see report.py for how to update them). Each part gets a share of the time and runs as
many rounds as fit, so a slow machine runs fewer. The table of verdicts at the end shows the number
of rounds.

The exit status is 0 if all parts completed, regardless of their results, and 1 if a part failed. A
part that cannot run here (network.py without root) is reported, and does not count as a failure.
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # this tree, not an installed version

from benchmarks.base import deadline, processes
from benchmarks.base.results import Result
from benchmarks.report import verdicts
from benchmarks.report.table import Table, text

HERE = Path(__file__).parent
LOCAL = HERE / "results" / "local"
SECONDS = 550.0  # until the deadline of the last part, which may exceed it by a few rounds
LEAST_SECONDS = 30.0  # minimum for a part: start, checks, a few rounds
CANNOT_RUN = 2  # exit status of a benchmark whose requirements are missing
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # GPUs are measured by make gpu
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # so that no host name has to resolve
    "KINETO_LOG_LEVEL": "99",  # silences the profiler's messages
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Part:
    """One process, or one process per rank.

    Attributes:
        command: arguments of Python, with ``{here}`` for this folder and ``{out}`` for the folder
            of the results.
    """

    name: str  # on the command line, and name of the result file
    seconds: float  # of the total time of all parts; scaled if the total differs
    command: str
    ranks: int | None = None  # number of ranks, for a script that torchrun would start


def _script(name: str, seconds: float, command: str, ranks: int | None = None) -> Part:
    out = f"{{out}}/{name}.json"
    return Part(name, seconds, f"{{here}}/{command} --out {out}", ranks)


# Few models, so that each gets enough rounds for a verdict: one for each kind of cost. The other
# models lie between these. Lines below 1 Gbit/s show the same, but take seconds per step.
_MODELS = "--models branchy many_small transformer many_large"
_LINES = "--hosts 2 --rates 1gbit none"
# Count collection errors as test errors: their usual exit status has another meaning.
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
            outcomes[part.name] = "failed: cut off with the whole run"  # until the part ends
            outcomes[part.name] = run(part, deadline.until(end, part.seconds / left), out)
    finally:  # also after an interrupt
        print("\n".join(["", *summary(outcomes, out)]), flush=True)
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


def run(part: Part, end: float, out: Path) -> str:
    """Run a part whose deadline is ``end``. Return its outcome as one line.

    The output of the part is passed on. A part that hangs is ended.
    """
    seconds = max(0.0, end - time.monotonic())
    print(f"\n--- {part.name} ({seconds:.0f} s)", flush=True)
    result = out / f"{part.name}.json"
    result.unlink(missing_ok=True)  # it may be from an earlier run
    start = time.monotonic()
    command = [
        each.replace("{here}", str(HERE)).replace("{out}", str(out))
        for each in shlex.split(part.command)
    ]
    # The minimum work of a part may exceed its share. A part that takes even longer hangs.
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
    """Yield the outcome of each part, and the verdicts of its results."""
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
    """Return the result file; ``None`` if it is missing or incomplete."""
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
