"""All benchmarks that a machine without a GPU can run, in under ten minutes: `make bench`.

    python benchmarks/bench.py [--only PART ...]

Writes ``benchmarks/results/cpu/``, and renders tables, plots and README's figures from it
(report.py). A part that fails or takes too long does not stop the others, but makes the exit status
1; one that cannot run here (network.py, unless as root) is reported and is no failure. Its file of
an earlier run then stays, with the date that it has.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import processes

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cpu"
_PYTEST = "-m pytest -q -p no:cacheprovider --benchmark-only"
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
        name: on the command line.
        limit: seconds after which it is ended.
        command: what python is to run.
        ranks: how many, for a script that wants to be started by torchrun.
    """

    name: str
    limit: float
    command: str
    ranks: int | None = None


# Together ten minutes, less what it takes to end a part that hangs. (The memory of many_small and
# many_large would take another minute.)
PARTS = (
    Part("step", 240, f"{HERE}/step.py --builds 2 --rounds 11 --out {RESULTS}/step.json", ranks=2),
    Part(
        "memory",
        65,
        f"{HERE}/memory.py --models mlp transformer branchy --out {RESULTS}/memory.json",
        ranks=2,
    ),
    Part(
        "detection",
        60,
        f"{HERE}/detection.py --builds 2 --rounds 15 --out {RESULTS}/detection.json",
        ranks=2,
    ),
    Part("kernels", 60, f"{_PYTEST} {HERE}/kernels --benchmark-json={RESULTS}/kernels.json"),
    Part("host", 50, f"{_PYTEST} {HERE}/host --rounds 30 --benchmark-json={RESULTS}/host.json"),
    Part(
        "network",
        90,
        f"{HERE}/network.py --hosts 2 --rates 1gbit 100mbit none --rounds 12 --seconds 30 "
        f"--out {RESULTS}/network.json",
    ),
    Part("timeline", 15, f"{HERE}/timeline.py --models transformer --out {RESULTS}", ranks=2),
    Part("report", 12, f"{HERE}/report.py --readme"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # so that started processes end too
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcomes = {part.name: run(part) for part in PARTS if part.name in options.only}
    print()
    for name, outcome in outcomes.items():
        print(f"{name:10} {outcome}")
    if _has_gpu():
        print("This machine has a GPU, of which make bench measures nothing: run make gpu too.")
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


def run(part: Part) -> str:
    """Run a part and pass on what it prints; what came of it, in a line."""
    print(f"\n--- {part.name} (at most {part.limit:.0f} s)", flush=True)
    start = time.monotonic()
    reading, writing = os.pipe()
    last: deque[str] = deque(["it said nothing"], maxlen=1)
    reader = threading.Thread(target=_echo, args=(reading, last), daemon=True)
    reader.start()
    with os.fdopen(writing, "wb") as output:
        command = [sys.executable, *part.command.split()]
        codes = processes.run(command, part.limit, output, part.ranks, ENVIRONMENT)
    reader.join(5)  # not forever: what has left its process group may hold the pipe open
    seconds = f"{time.monotonic() - start:.0f} s"
    if not any(codes) and None not in codes:
        return f"ok, {seconds}"
    if codes == [CANNOT_RUN]:
        return f"not run: {last[0]}"
    if set(codes) <= {0, None}:
        return f"failed: not done after {seconds}"
    return f"failed: exit status {next(code for code in codes if code)}, see above: {last[0]}"


def _echo(pipe: int, last: deque[str]) -> None:
    """Print lines as they come; keep the last that says something."""
    with os.fdopen(pipe, errors="replace") as lines:
        for line in lines:
            print(line, end="", flush=True)
            if line.strip():
                last.append(line.strip())


def _has_gpu() -> bool:
    import torch  # not before the parts: it holds memory

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
