"""Peak memory of stock DDP and tritonddp above the unwrapped model.

    torchrun --standalone --nproc-per-node 2 benchmarks/memory.py [--models mlp ...] [--out FILE]

On the CPU every allocation and release of tensor storage on rank 0 is counted exactly: torch's
profiler records each with its size and time (``profile_memory``), from before the model is made
to after it is gone, C++ code included. It does not see what another thread releases, and now and
then gloo's thread is the last to hold a tensor: a run after which bytes seem to live on is thrown
away and repeated. On CUDA the caching allocator's own peak is read, which rounds sizes up to 512
bytes. Memory that gloo or NCCL take for themselves is in neither.

Two phases of a run are told apart: wrapping plus the *first* two steps, in which buckets are built
and rebuilt, and *steady* steps. Gradients are set to None before each backward. The peak of a
phase is compared with that of the same phase of the unwrapped model.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine
from configurations import UNWRAPPED, Configuration, families
from deadline import deadline
from models import CASES, Case, default_names, loss
from ranks import Ranks, process_group
from traffic import bucket_bytes

PHASES = ("wrapping", "first", "steady")
FIRST_STEPS = 2  # torch rebuilds its buckets at the second forward
STEADY_STEPS = 3
ATTEMPTS = 30
_MARK = "memory benchmark: "


@dataclass(frozen=True)
class Peaks:
    """Highest number of live bytes in each phase, the model's own parameters included.

    Attributes:
        drift: by how many live bytes grew from the last step but one to the last.
        left: bytes that live when everything is gone.
    """

    wrapping: int
    first: int
    steady: int
    drift: int
    left: int


@dataclass(frozen=True)
class Row:
    """One configuration beside the unwrapped model, in bytes.

    Attributes:
        buckets: all bucket buffers.
        largest_bucket: the largest of them.
        above: peak above the unwrapped model's, by phase.
        drift: see :class:`Peaks`.
    """

    buckets: int
    largest_bucket: int
    above: dict[str, int]
    drift: int

    @property
    def holds(self) -> bool:
        """Whether the steps take at most the buckets and one bucket of gradients in flight."""
        limit = self.buckets + self.largest_bucket
        return self.drift == 0 and max(self.above["first"], self.above["steady"]) <= limit


def main() -> None:
    options = _options()
    with process_group(options.backend) as ranks:
        facts = machine.describe()
        if ranks.rank == 0:
            print(machine.summary(facts))
            print(f"{ranks.world_size} ranks over {ranks.backend} on {ranks.device.type}; MiB")
        results: dict[str, dict[str, Row]] = {}
        left_out: list[str] = []
        for name in options.models or default_names(ranks.device):
            for label, row in measure(CASES[name], ranks, needed=not results):
                if row is None:
                    left_out.append(f"{name} {label}")
                else:
                    results.setdefault(name, {})[label] = row
                if ranks.rank == 0 and options.out is not None:  # whatever cuts the run off
                    _write(options.out, facts, ranks, results, left_out)
            if ranks.rank == 0 and name in results:
                print("\n".join(table(name, results[name])), flush=True)
        if ranks.rank == 0 and left_out:
            print(f"\nno time was left for: {', '.join(left_out)}")
        if ranks.rank == 0 and options.out is not None:
            print(f"\nwritten to {options.out}")


def _write(
    path: Path,
    facts: dict[str, Any],
    ranks: Ranks,
    results: dict[str, dict[str, Row]],
    left_out: list[str],
) -> None:
    content = {
        "benchmark": "memory",
        "machine": facts,
        "world_size": ranks.world_size,
        "backend": ranks.backend,
        "device": ranks.device.type,
        "models": {
            name: {each: {**asdict(row), "holds": row.holds} for each, row in rows.items()}
            for name, rows in results.items()
        },
        "left_out": left_out,
    }
    machine.write_json(path, content)


def measure(case: Case, ranks: Ranks, needed: bool) -> Iterator[tuple[str, Row | None]]:
    """All configurations on one model by name, one after the other, ours first; collective.

    After the deadline there is ``None`` instead, but for the first if it is ``needed``.
    """
    if ranks.device.type == "cuda":
        # The allocator's figures do not see what is on the host, where drawing takes long.
        drawn = case.model(torch.device("cpu"))
        _cuda_peaks(
            UNWRAPPED, case, ranks, True, drawn, 0
        )  # cuBLAS takes its workspace, and keeps it
        # What stock leaves behind, its buckets for example, is only freed in the next run. Counted
        # from what was there when that began, the next one would seem to need less.
        floor = torch.cuda.memory_allocated(ranks.device)
        peaks_of = partial(_cuda_peaks, drawn=drawn, floor=floor)
    else:
        peaks_of = _cpu_peaks
    groups = families(case.unused)
    stock = (each for group in groups for each in group.stock)
    bare: Peaks | None = None
    for configuration in (*(group.ours for group in groups), *stock):
        found = None
        if needed or not _late(ranks):
            bare = bare or peaks_of(UNWRAPPED, case, ranks, needed=True)[0]
            found = peaks_of(configuration, case, ranks, needed=needed)
        if found is None:
            yield configuration.name, None
            continue
        needed = False
        peaks, buckets = found
        above = {phase: getattr(peaks, phase) - getattr(bare, phase) for phase in PHASES}
        yield configuration.name, Row(sum(buckets), max(buckets), above, peaks.drift)


def _late(ranks: Ranks) -> bool:
    """Whether there is a deadline and it has come; collective."""
    return deadline() < math.inf and ranks.agreed(time.monotonic() > deadline())


def _cpu_peaks(
    configuration: Configuration, case: Case, ranks: Ranks, needed: bool
) -> tuple[Peaks, list[int]] | None:
    """Run until the profiler of rank 0 has seen the release of whatever was allocated.

    Returns:
        ``None`` if that did not happen before the deadline and is not ``needed``.

    Raises:
        RuntimeError: on all ranks, if that never happened: then something leaks.
    """
    for _ in range(ATTEMPTS):
        peaks, buckets = _profiled(configuration, case, ranks)
        left = torch.tensor(peaks.left)
        dist.broadcast(left, src=0)
        if left == 0:
            return peaks, buckets
        if not needed and _late(ranks):
            return None
    raise RuntimeError(
        f"{configuration.name!r} on {case.name!r}: {peaks.left} bytes live on after the model, in "
        f"each of {ATTEMPTS} runs"
    )


def _profiled(configuration: Configuration, case: Case, ranks: Ranks) -> tuple[Peaks, list[int]]:
    """Run once under the profiler and replay its record of allocations and releases."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        batch = case.batch(ranks.device, seed=ranks.rank)
        model = case.model(ranks.device)
        with record_function(_MARK + "wrapping"):
            model = configuration.wrap(model)
        for _ in range(FIRST_STEPS):
            with record_function(_MARK + "first"):
                _step(model, batch)
        for _ in range(STEADY_STEPS):
            with record_function(_MARK + "steady"):
                _step(model, batch)
        buckets = bucket_bytes(model)
        del model, batch
        gc.collect()  # within the profile, so that nothing of this run is released in the next
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return replay(events), buckets


def replay(events: Sequence[dict[str, Any]]) -> Peaks:
    """Peaks by phase from the events of a Chrome trace."""
    changes = sorted(
        (event["ts"], event["args"]["Ev Idx"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(_MARK))
        for event in events
        if event.get("ph") == "X" and event.get("name", "").startswith(_MARK)
    )
    peaks = dict.fromkeys(PHASES, 0)
    ends = []
    live, position = 0, 0
    for start, end, phase in marks:
        while position < len(changes) and changes[position][0] < start:
            live += changes[position][2]
            position += 1
        peaks[phase] = max(peaks[phase], live)
        while position < len(changes) and changes[position][0] <= end:
            live += changes[position][2]
            position += 1
            peaks[phase] = max(peaks[phase], live)
        ends.append(live)
    left = live + sum(size for _, _, size in changes[position:])
    return Peaks(**peaks, drift=ends[-1] - ends[-2], left=left)


def _cuda_peaks(
    configuration: Configuration,
    case: Case,
    ranks: Ranks,
    needed: bool,
    drawn: nn.Module,
    floor: int,
) -> tuple[Peaks, list[int]]:
    """Run a copy of ``drawn`` once and read the caching allocator's peak of each phase.

    Above ``floor`` bytes, which are there all the time.
    """
    gc.collect()
    ranks.synchronize()
    peaks = dict.fromkeys(PHASES, 0)
    ends = []

    def run(phase: str, step: Any, *arguments: Any) -> Any:
        torch.cuda.reset_peak_memory_stats(ranks.device)
        result = step(*arguments)
        ranks.synchronize()
        peak = torch.cuda.max_memory_allocated(ranks.device) - floor
        peaks[phase] = max(peaks[phase], peak)
        ends.append(torch.cuda.memory_allocated(ranks.device))
        return result

    batch = case.batch(ranks.device, seed=ranks.rank)
    model = copy.deepcopy(drawn).to(ranks.device)
    model = run("wrapping", configuration.wrap, model)
    for _ in range(FIRST_STEPS):
        run("first", _step, model, batch)
    for _ in range(STEADY_STEPS):
        run("steady", _step, model, batch)
    buckets = bucket_bytes(model)
    del model, batch
    gc.collect()
    left = torch.cuda.memory_allocated(ranks.device) - floor
    return Peaks(**peaks, drift=ends[-1] - ends[-2], left=left), buckets


def _step(model: nn.Module, batch: Any) -> None:
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()


def table(name: str, rows: dict[str, Row]) -> Iterator[str]:
    """Lines that show a model's result, in MiB above the unwrapped model."""
    yield (
        f"\n{name:34}{'buckets':>9}{'largest':>9}{'wrapping':>10}"
        f"{'first':>9}{'- buckets':>11}{'steady':>9}{'- buckets':>11}"
    )
    for label, row in rows.items():
        mib = {phase: size / 2**20 for phase, size in row.above.items()}
        buckets = row.buckets / 2**20
        claim = "" if not label.startswith("ours") else "  holds" if row.holds else "  BROKEN"
        drift = f"  drifts by {row.drift} bytes" if row.drift else ""
        yield (
            f"  {label:32}{buckets:9.2f}{row.largest_bucket / 2**20:9.2f}{mib['wrapping']:10.2f}"
            f"{mib['first']:9.2f}{mib['first'] - buckets:11.2f}"
            f"{mib['steady']:9.2f}{mib['steady'] - buckets:11.2f}{claim}{drift}"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=[])
    parser.add_argument("--backend", help="default: nccl with a CUDA device, else gloo")
    parser.add_argument("--out", type=Path, help="write JSON here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
