"""Peak memory of stock DDP and tritonddp above the unwrapped model.

    torchrun --standalone --nproc-per-node 2 benchmarks/step/memory.py [--models mlp ...]
        [--out FILE]

On the CPU, every allocation and release of tensor storage on rank 0 is counted exactly: torch's
profiler records each with its size and time (``profile_memory``), from before the model is created
until after it is released, including C++ code. It does not see releases by other threads, and
sometimes gloo's thread holds the last reference to a tensor: a run in which bytes seem to remain is
discarded and repeated. On CUDA, the caching allocator's peak is read, which rounds sizes up to 512
bytes. Internal memory of gloo or NCCL is not included. On the CPU, ours uses the process group: for
shared memory of the host, the profiler would count each mapping as an allocation, including those
of the other ranks and pages that were never written.

A run has two phases: wrapping plus the *first* two steps, in which buckets are built and rebuilt,
and *steady* steps. Gradients are set to None before each backward. The peak of a phase is compared
with the same phase of the unwrapped model.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.models.cases import CASES, Case, backward, default_names
from benchmarks.models.configurations import UNWRAPPED, Configuration, families, through
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.traffic import bucket_bytes

TRANSPORT = "process_group"  # of ours on the CPU
PHASES = ("wrapping", "first", "steady")
FIRST_STEPS = 2  # torch rebuilds its buckets at the second forward
STEADY_STEPS = 3
ATTEMPTS = 30
_MARK = "memory benchmark: "


@dataclass(frozen=True)
class Peaks:
    """Highest number of live bytes in each phase, including the model's parameters."""

    wrapping: int
    first: int
    steady: int
    drift: int  # growth of live bytes from the second to last step to the last
    left: int  # live bytes after everything was released


@dataclass(frozen=True)
class Row:
    """One configuration compared with the unwrapped model, in bytes."""

    buckets: int  # of all bucket buffers
    largest_bucket: int  # the largest of them
    above: dict[str, int]  # peak above the unwrapped model's, by phase
    drift: int  # see Peaks

    @property
    def holds(self) -> bool:
        """Return True if steps need at most the buckets and one bucket of gradients in flight."""
        limit = self.buckets + self.largest_bucket
        return self.drift == 0 and max(self.above["first"], self.above["steady"]) <= limit


def main() -> None:
    options = command.parser(__doc__, models=(CASES, ()), backend=True).parse_args()
    with process_group(options.backend) as ranks:
        facts = {"world_size": ranks.world_size, "backend": ranks.backend}
        facts["device"] = ranks.device.type
        if ranks.device.type == "cpu":
            facts["transport"] = TRANSPORT
        output = Output("memory", options.out, ranks.rank == 0, **facts)
        results: dict[str, dict[str, Any]] = {}
        for name in options.models or default_names(ranks.device):
            for label, row in measure(CASES[name], ranks):
                results.setdefault(name, {})[label] = {**asdict(row), "holds": row.holds}
                output.write({"models": results})
            output.say("", *text(tables.memory(output.only("models", name))))
        output.end()


def measure(case: Case, ranks: Ranks) -> Iterator[tuple[str, Row]]:
    """Measure all configurations of one model, one after the other, ours first; collective."""
    groups = families(case.unused)
    if ranks.device.type == "cuda":
        # Draw on the host, which takes long but is not in the allocator's figures.
        drawn = case.model(torch.device("cpu"))
        # Let cuBLAS allocate its workspace, which it keeps.
        _cuda_peaks(UNWRAPPED, case, ranks, drawn, 0)
        # Memory that stock leaves behind, for example its buckets, is only freed in the next run.
        # Relative to the memory at its start, that run would seem to need less.
        floor = torch.cuda.memory_allocated(ranks.device)
        peaks_of = partial(_cuda_peaks, drawn=drawn, floor=floor)
    else:
        peaks_of = _cpu_peaks
        groups = tuple(replace(one, ours=through(one.ours, TRANSPORT)) for one in groups)
    bare, _ = peaks_of(UNWRAPPED, case, ranks)
    stock = (each for group in groups for each in group.stock)
    for configuration in (*(group.ours for group in groups), *stock):
        peaks, buckets = peaks_of(configuration, case, ranks)
        above = {phase: getattr(peaks, phase) - getattr(bare, phase) for phase in PHASES}
        yield configuration.name, Row(sum(buckets), max(buckets), above, peaks.drift)


def _cpu_peaks(configuration: Configuration, case: Case, ranks: Ranks) -> tuple[Peaks, list[int]]:
    """Run until the profiler of rank 0 has seen the release of all allocations.

    Raises:
        RuntimeError: on all ranks, if that never happens, because of a leak.
    """
    for _ in range(ATTEMPTS):
        peaks, buckets = _profiled(configuration, case, ranks)
        left = torch.tensor(peaks.left)
        dist.broadcast(left, src=0)
        if left == 0:
            return peaks, buckets
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
                backward(model, batch)
        for _ in range(STEADY_STEPS):
            with record_function(_MARK + "steady"):
                backward(model, batch)
        buckets = bucket_bytes(model)
        del model, batch
        gc.collect()  # within the profile, so that the next run releases nothing of this one
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return replay(events), buckets


def replay(events: Sequence[dict[str, Any]]) -> Peaks:
    """Return the peaks by phase from the events of a Chrome trace."""
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
    configuration: Configuration, case: Case, ranks: Ranks, drawn: nn.Module, floor: int
) -> tuple[Peaks, list[int]]:
    """Run a copy of ``drawn`` once, and read the caching allocator's peak in each phase.

    Peaks are relative to ``floor`` bytes, which are always allocated.
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
        run("first", backward, model, batch)
    for _ in range(STEADY_STEPS):
        run("steady", backward, model, batch)
    buckets = bucket_bytes(model)
    del model, batch
    gc.collect()
    left = torch.cuda.memory_allocated(ranks.device) - floor
    return Peaks(**peaks, drift=ends[-1] - ends[-2], left=left), buckets


if __name__ == "__main__":
    main()
