"""Everything that a machine with one GPU can measure, in one command.

    python benchmarks/gpu.py [--out FOLDER]        (part of `make gpu`)

1. Kernels: flatten and unflatten on four parameter lists, in fp32 and bf16, see kernel_speed.py.
2. Step: step.py over NCCL with one rank. There is nothing to send: what remains is the work around
   the collective.
3. Two ranks on the one card, if NCCL can be brought to it: gradients of ours and stock are
   compared. Times are recorded, but they measure how ranks take turns on the card.
4. Memory: memory.py over NCCL with one rank.

Parts 2 to 4 run as processes with a time limit; whatever they started is ended with them. The
result file is rewritten after each part, so that a part that fails or is cut off leaves the others.

``--device cpu`` goes through the same motions with the CPU's kernels and gloo, on small inputs, to
find mistakes in this file where there is no GPU. Its figures mean nothing and say so.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import kernel_speed
import machine
import step
from contenders import CEILING, OURS
from shapes import PARAMETER_LISTS

HERE = Path(__file__).parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NOT_EXERCISED_ON_CPU = (
    "the Triton kernels (the plain-torch references ran instead)",
    "timing by CUDA events, the sleep that hides launch gaps, host time beside device time",
    "the count of launches by the profiler",
    "NCCL, and two ranks on one card",
    "peak memory of the CUDA allocator",
    "the parameter lists of GPT-2 small and Llama 3 8B",
)


@dataclass(frozen=True)
class Plan:
    """How much of everything, and for how long at most (seconds)."""

    lists: tuple[str, ...]
    kernel_rounds: int
    kernel_limit: float
    step_arguments: tuple[str, ...]
    step_limit: float
    pair_arguments: tuple[str, ...]
    pair_limit: float
    memory_arguments: tuple[str, ...]
    memory_limit: float


ON_GPU = Plan(
    lists=tuple(PARAMETER_LISTS),
    kernel_rounds=40,
    kernel_limit=90,
    step_arguments=("--rounds", "25", "--builds", "2"),
    step_limit=90,
    pair_arguments=("--rounds", "3", "--builds", "1", "--models", "many_small", "transformer"),
    pair_limit=60,
    memory_arguments=(),
    memory_limit=30,
)
ON_CPU = Plan(
    lists=("many_small", "resnet50"),
    kernel_rounds=3,
    kernel_limit=30,
    step_arguments=("--rounds", "2", "--builds", "1", "--models", "mlp"),
    step_limit=60,
    pair_arguments=("--rounds", "2", "--builds", "1", "--models", "mlp"),
    pair_limit=60,
    memory_arguments=("--models", "mlp"),
    memory_limit=60,
)


@dataclass
class Report:
    """The result file, and the clock that all parts share."""

    path: Path
    content: dict[str, Any]
    end: float
    failures: list[str] = field(default_factory=list)

    def left(self, limit: float) -> float:
        """Seconds that a part with this limit has."""
        return min(limit, self.end - time.monotonic())

    def add(self, part: str, result: Any) -> None:
        self.content[part] = result
        machine.write_json(self.path, self.content)

    def fail(self, part: str, why: str) -> None:
        self.failures.append(f"{part}: {why}")
        self.add("failures", self.failures)
        print(f"{part}: FAILED: {why}", flush=True)


def main() -> int:
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py: nothing was measured: torch sees no CUDA device", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # so that started processes end too
    smoke = options.device == "cpu"
    plan = ON_CPU if smoke else ON_GPU
    facts = machine.describe()
    report = Report(
        _result_path(options.out, facts, smoke),
        {"benchmark": "gpu", "machine": facts},
        time.monotonic() + options.budget,
    )
    print(machine.summary(facts))
    if smoke:
        torch.set_num_threads(1)
        report.content["smoke"] = True
        report.content["not_exercised"] = NOT_EXERCISED_ON_CPU
        print("SMOKE RUN on the CPU: its figures mean nothing.")
    backend = "gloo" if smoke else "nccl"
    kernels(plan, torch.device(options.device), report)
    for part, script, ranks, arguments, limit in (
        ("step", "step.py", 1, plan.step_arguments, plan.step_limit),
        ("two_ranks_on_one_card", "step.py", 2, plan.pair_arguments, plan.pair_limit),
        ("memory", "memory.py", 1, plan.memory_arguments, plan.memory_limit),
    ):
        run_ranks(part, script, ranks, ["--backend", backend, *arguments], limit, report)
    report.add("load_average_after", os.getloadavg())
    print("\n".join(["", *table(report.content)]))
    if smoke:
        print("\nSMOKE RUN on the CPU: the figures above mean nothing. Not exercised:")
        print("\n".join(f"  - {each}" for each in NOT_EXERCISED_ON_CPU))
    for failure in report.failures:
        print(f"FAILED: {failure}")
    print(f"written to {report.path}")
    return 1 if report.failures else 0


def kernels(plan: Plan, device: torch.device, report: Report) -> None:
    """Part 1, in this process."""
    stop = time.monotonic() + report.left(plan.kernel_limit)
    results: dict[str, Any] = {}
    for name in plan.lists:
        for label, dtype in DTYPES.items():
            key = f"{name} {label}"
            if time.monotonic() > stop:
                report.fail("kernels", f"no time was left for {key}")
                continue
            start = time.monotonic()
            try:
                results[key] = kernel_speed.measure(
                    PARAMETER_LISTS[name](), dtype, device, plan.kernel_rounds
                )
            except RuntimeError as error:  # wrong results, out of memory
                report.fail("kernels", f"{key}: {error}")
            else:
                print(f"kernels: {key} took {time.monotonic() - start:.1f} s", flush=True)
            report.add("kernels", results)


def run_ranks(
    part: str, script: str, ranks: int, arguments: Sequence[str], limit: float, report: Report
) -> None:
    """Run a script on ``ranks`` processes of this machine, as torchrun would, within a time limit.

    Not by torchrun: its rendezvous wants a host name that resolves, which a machine without a
    network may lack. Every rank leads a process group of its own, which is killed at the end.
    """
    limit = report.left(limit)
    if limit < 5:
        return report.fail(part, "no time was left")
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, str(HERE / script), *arguments, "--out", str(result)]
        with log.open("w") as output:
            codes = _wait(command, ranks, output, limit)
        text = log.read_text(errors="replace")
        print(f"\n--- {part}: {script}, ranks: {ranks}\n{text}", flush=True)
        if result.exists():
            report.add(part, json.loads(result.read_text()))
        if any(code != 0 for code in codes):
            ended = ", ".join("timed out" if code is None else f"exit {code}" for code in codes)
            report.fail(part, f"{ended} within {limit:.0f} s; {_last_error(text)}")


def _wait(command: Sequence[str], ranks: int, output: Any, limit: float) -> list[int | None]:
    """Exit codes of the ranks; ``None`` for one that was still running at the time limit."""
    end = time.monotonic() + limit
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            names |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
            environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
            if "gloo" in command:
                environment["OMP_NUM_THREADS"] = "1"
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        while time.monotonic() < end:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):  # all done, or one failed: the others would wait
                break
            time.sleep(0.1)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def table(content: dict[str, Any]) -> Iterator[str]:
    """The short table that comes last."""
    for key, result in content.get("kernels", {}).items():
        size = result["bytes"] / 1e6
        yield f"{key}: {result['tensors']} tensors, {size:.1f} MB"
        for direction in kernel_speed.DIRECTIONS:
            for name, speed in result[direction].items():
                device, host, launches = (
                    speed["device_seconds"]["median"],
                    speed["host_seconds"],
                    speed["launches"],
                )
                mark = {OURS: "*", CEILING: "="}.get(name, " ")
                yield (
                    f" {mark}{direction:10} {name:23}{device * 1e6:10.1f} us"
                    f"{speed['gb_per_s']:9.1f} GB/s{speed['of_ceiling']:7.2f} of copy"
                    + ("" if host is None else f"{host * 1e6:10.1f} us host")
                    + ("" if launches is None else f"{launches:6d} launches")
                )
    for part in ("step", "two_ranks_on_one_card"):
        for name, result in content.get(part, {}).get("models", {}).items():
            for family, one in result["comparisons"].items():
                yield (
                    f"{part}: {name} {family}: ours / {one['best']!r} "
                    f"{step.Ratio(**one['ours'])}, overhead ratio {one['overhead']:.2f}"
                )
            same = all(each["same_bits"] for each in result["gradients"].values())
            yield f"{part}: {name}: gradients {'bit-equal' if same else 'equal to rounding'}"


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if re.search(r"\w*(Error|Exception)\b", line)]
    return f"last error: {lines[-1][:300]}" if lines else "no error was printed"


def _result_path(folder: Path | None, facts: dict[str, Any], smoke: bool) -> Path:
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="tritonddp-smoke-")) if smoke else HERE / "results"
    gpu = facts["gpu"]["name"] if facts["gpu"] and not smoke else "smoke-on-cpu"
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return folder / f"gpu-{name}-{datetime.date.today().isoformat()}.json"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=os.environ.get("OUT"),
        help="folder of the result (default: $OUT, else benchmarks/results)",
    )
    parser.add_argument(
        "--budget", type=float, default=270, help="seconds for everything (default 270)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        options.out = Path(options.out)
    return options


if __name__ == "__main__":
    sys.exit(main())
