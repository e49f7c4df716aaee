"""When does each gradient become ready, and when is each bucket on its way? Draws a backward.

    torchrun --standalone --nproc-per-node 2 benchmarks/timeline/timeline.py --out FOLDER
        [--models mlp ...]

Writes into the folder, for each model,

- ``timeline-<model>.png``: of the traced backwards that one whose exposed time is the median,
- ``timeline-<model>.trace.json.gz``: all of them, for https://ui.perfetto.dev or chrome://tracing,

and ``timeline.json`` with their times. It is rank 0's view, since ranks have clocks of their own.

Tracing must not change gradients, which is checked first. It does cost time: backwards without it
are timed before and after the traced ones and stand beside them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import tritonddp
from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.deadline import rounds, share
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.models.cases import CASES, Batch, Case, loss
from benchmarks.models.gradients import Gradient
from tritonddp.diagnostics.timeline import Backward, Timeline

DISCARDED = 5  # backwards at first: buckets are formed anew after the first, allocators settle


def main() -> None:
    options = _options()
    from benchmarks.timeline.plot import (
        draw,  # before anything runs: it says so if matplotlib is missing
    )

    with process_group(options.backend) as ranks:
        output = Output(
            "timeline",
            options.out / "timeline.json",
            ranks.rank == 0,
            world_size=ranks.world_size,
            backend=ranks.backend,
            device=ranks.device.type,
            views=options.views,
            bucket_cap_mb=options.bucket_cap_mb,
        )
        where = f"{ranks.world_size} ranks over {ranks.backend} on {ranks.device.type}"
        output.say(f"{where}; ms")
        results = {}
        for name in options.models:
            timeline, results[name] = measure(CASES[name], ranks, options)
            output.write({"models": results})
            output.say(table(name, results[name]))
            path = options.out / f"timeline-{name}"
            if ranks.rank == 0:
                timeline.save_chrome_trace(path.with_suffix(".trace.json.gz"))
                shown, details = median(timeline.backwards), _details(timeline.backwards, where)
                draw(shown, path.with_suffix(".png"), what=name, details=details)
        output.say(f"\nwritten to {options.out}")


def measure(
    case: Case, ranks: Ranks, options: argparse.Namespace
) -> tuple[Timeline, dict[str, Any]]:
    """Trace ``--steps`` backwards of a model, with as many untraced ones around; collective.

    Fewer where a deadline comes first.
    """
    batch = case.batch(ranks.device, seed=ranks.rank)
    steps, module = options.steps, case.model(ranks.device)
    model = tritonddp.DistributedDataParallel(
        module,
        gradient_as_bucket_view=options.views,
        bucket_cap_mb=options.bucket_cap_mb,
    )
    for _ in range(DISCARDED):
        _backward(model, batch, ranks)
    check(model, batch, ranks)

    def timed(most: int, part: float) -> list[float]:
        numbers = rounds(most, share(part), least=1, agreed=ranks.agreed)
        return [_backward(model, batch, ranks) for _ in numbers]

    untraced = timed(-(-steps // 2), 1 / 4)
    with tritonddp.trace(model) as timeline:
        traced = timed(steps, 2 / 3)
    untraced += timed(steps // 2, 1)
    return timeline, {
        "untraced_seconds": untraced,
        "traced_seconds": traced,
        "exposed_seconds": [backward.exposed for backward in timeline.backwards],
        "compute_seconds": [each.compute_ended - each.began for each in timeline.backwards],
        "median": asdict(median(timeline.backwards)),
    }


def check(model: nn.Module, batch: Batch, ranks: Ranks) -> None:
    """Raises RuntimeError if gradients of a traced backward are not those of an untraced one."""
    _backward(model, batch, ranks)
    expected = Gradient.of(model)
    with tritonddp.trace(model):
        _backward(model, batch, ranks)
    # Kernels on a GPU, and NCCL, need not add in the same order twice.
    if Gradient.of(model).off(expected) > (0.0 if ranks.device.type == "cpu" else 1e-5):
        raise RuntimeError("the trace changed gradients: nothing was measured")


def median(backwards: list[Backward]) -> Backward:
    """The one whose exposed time is the (lower) median."""
    return sorted(backwards, key=lambda each: each.exposed)[(len(backwards) - 1) // 2]


def table(name: str, result: dict[str, Any]) -> str:
    """A line: medians, and how far the exposed time ranged."""
    exposed = result["exposed_seconds"]
    return (
        f"{name:14} backward {_median_ms(result['traced_seconds'])}"
        f" (untraced {_median_ms(result['untraced_seconds'])}),"
        f" compute {_median_ms(result['compute_seconds'])},"
        f" exposed {_median_ms(exposed)} ({min(exposed) * 1e3:.2f} to {max(exposed) * 1e3:.2f})"
    )


def _backward(model: nn.Module, batch: Batch, ranks: Ranks) -> float:
    """One forward and backward; the seconds of the backward on this rank, device included."""
    model.zero_grad()
    return ranks.timed(loss(model, batch).backward)


def _details(backwards: list[Backward], where: str) -> str:
    buckets = median(backwards).buckets
    mib = sum(bucket.nbytes for bucket in buckets) / 2**20
    exposed = [backward.exposed * 1e3 for backward in backwards]
    return (
        f"rank 0 of {where.replace(' ranks', '', 1)}; "
        f"{mib:.1f} MiB in {len(buckets)} bucket{'s' if len(buckets) > 1 else ''}; "
        f"median of {len(backwards)} backwards, exposed {min(exposed):.2f} to {max(exposed):.2f} ms"
    )


def _median_ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"


def _options() -> argparse.Namespace:
    files = "folder for all that is written"
    parser = command.parser(__doc__, models=(CASES, CASES), backend=True, out=files)
    parser.add_argument(
        "--steps", type=command.positive, default=9, help="traced backwards (default 9)"
    )
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("--bucket-cap-mb", type=float, help="default: that of the class")
    return parser.parse_args()


if __name__ == "__main__":
    main()
