"""Training steps as users run them, beside stock's, on one card or several.

    torchrun --standalone --nproc-per-node gpu benchmarks/gpu/training.py [--models resnet50 ...]
        [--precision bf16|tf32|fp32] [--out FILE]

Forward, backward and a fused AdamW under bf16 autocast, with batches that keep a GPU busy
(ResNet-50 64 images, GPT-2 8 x 1,024 tokens, a Llama layer 4 x 2,048). Steps run freely: the host
does not wait for the device within a sample, which is a few steps between two events, after an
untimed step. Samples of all configurations are interleaved in rounds, in a newly shuffled order,
and all models are rebuilt several times. Gradients are compared first. With several GPUs, bare
all-reduces are timed too, and the exposed time after the last gradient.
"""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.base import command, deadline
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.models.cases import CASES, Batch, Case, loss
from benchmarks.models.configurations import UNWRAPPED, UNWRAPPED_AGAIN, Configuration, families
from benchmarks.models.gradients import STEPS, check
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.comparison import IdleError
from benchmarks.step.plan import SETTLED
from benchmarks.step.rounds import builds
from benchmarks.step.traffic import exposed, sent_in

MODELS = ("gpt2_small", "resnet50", "llama3_8b_layer")
OPTIMIZER = "fused AdamW"
CALLS = 4  # consecutive calls of a bare all-reduce
# By name, a setup for the samples: one for real exchanges, one per simulated line.
Conditions = Mapping[str, Callable[[], object]]


def main() -> None:
    options = parser(__doc__, MODELS).parse_args()
    with process_group("nccl") as ranks:
        run("training", options, ranks, configurations(), {"": lambda: None})


def parser(doc: str | None, models: Sequence[str]) -> ArgumentParser:
    made = command.parser(doc, rounds=5, models=(CASES, models))
    made.add_argument("--builds", type=command.positive, default=3, help="of all models")
    what = "of bare all-reduces"
    made.add_argument("--mib", nargs="+", type=command.positive, default=[25, 100, 400], help=what)
    made.add_argument("--steps", type=command.positive, default=3, help="of a sample")
    made.add_argument("--precision", choices=("bf16", "tf32", "fp32"), default="bf16")
    return made


def configurations() -> list[Configuration]:
    copies, views = families()
    of_all = (*copies.stock, copies.ours, *views.stock, views.ours)
    return [UNWRAPPED, UNWRAPPED_AGAIN, *of_all]


def run(
    name: str,
    options: Namespace,
    ranks: Ranks,
    compared: Sequence[Configuration],
    conditions: Conditions,
    **heading: Any,
) -> None:
    """Measure all models, each in its share of the time, and write the results after each model."""
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    batches = {each: CASES[each].examples[1] for each in options.models}
    heading |= {"precision": options.precision, "optimizer": OPTIMIZER, "batches": batches}
    output = Output(name, options.out, ranks.rank == 0, world_size=ranks.world_size, **heading)
    if ranks.world_size > 1:
        output.write({"rows": bandwidth(ranks, options.mib)})
    found: dict[str, Any] = {}
    for model, end in deadline.shares(options.models):
        try:
            found[model] = measure(CASES[model], ranks, options, compared, conditions, end)
        except torch.OutOfMemoryError as error:  # the GPU cannot hold so many copies
            if ranks.world_size > 1:
                raise
            found[model] = {"error": str(error)}
        gc.collect()
        output.write({"models": found})
        output.say("", *text(tables.training(output.only("models", model))))


def measure(
    case: Case,
    ranks: Ranks,
    options: Namespace,
    compared: Sequence[Configuration],
    conditions: Conditions,
    end: float,
) -> dict[str, Any]:
    """Return the seconds of the slowest rank, by condition, configuration, build and round."""
    seconds: dict[str, dict[str, list[list[float]]]] = {
        condition: {each.name: [] for each in compared} for condition in conditions
    }
    late: dict[str, float] = {}
    for left, models in builds(case, compared, ranks, options.builds, end):
        is_first = left == options.builds
        steps = {name: Step(model, options.precision) for name, model in models.items()}
        if is_first:
            errors = {each.name: each.error for each in compared}
            check(models, case, ranks, "stock", (UNWRAPPED.name, UNWRAPPED_AGAIN.name), errors)
        small = case.batch(ranks.device, ranks.rank)
        batch = case.batch(ranks.device, ranks.rank, "large")
        for _ in range(SETTLED["cuda"] - (STEPS if is_first else 0)):
            for step in steps.values():
                step(small)
        for name, model in models.items():
            sent, _ = sent_in(partial(steps[name], small), model, ranks.world_size)
            if not (sent or name.startswith("unwrapped")):
                raise IdleError(f"{name!r} sends nothing: nothing was timed")
        if is_first and ranks.world_size > 1:
            late.update({name: step.exposed(batch, ranks) for name, step in steps.items()})
        ways = {name: partial(step.sample, batch, options.steps) for name, step in steps.items()}
        for number, (condition, begin) in enumerate(conditions.items()):
            begin()
            until = deadline.until(end, 1 / (left * len(conditions) - number))
            numbers = deadline.rounds(options.rounds, until, discarded=1, agreed=ranks.agreed)
            samples = deadline.interleaved(ways, numbers, f"{case.name} {left} {condition}")
            for name, found in ranks.slowest(samples).items():
                seconds[condition][name].append(found)
        del steps, ways, step, model  # they keep the models alive
    return {"samples": seconds, "exposed": late}


class Step:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        self._model, self._precision = model, precision
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def __call__(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        with self._cast():
            value = loss(self._model, batch)
        value.backward()
        self._optimizer.step()

    def _cast(self) -> AbstractContextManager[Any]:
        if self._precision == "bf16":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

    def sample(self, batch: Batch, steps: int) -> float:
        """Return the seconds per step. An untimed step precedes them, for which nothing waits."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self(batch)
        begin.record()
        for _ in range(steps):
            self(batch)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / steps

    def exposed(self, batch: Batch, ranks: Ranks) -> float:
        with self._cast():
            return exposed(self._model, batch, ranks)


def bandwidth(
    ranks: Ranks, sizes: Sequence[int], carry: Callable[[torch.Tensor], object] | None = None
) -> list[dict[str, Any]]:
    """Time all-reduces alone: the link's bandwidth, also as the *bus* bandwidth of nccl-tests."""
    rows = []
    for mib in sizes:
        values = torch.zeros(mib << 18, device=ranks.device)

        def reduce(values: torch.Tensor = values) -> None:
            for _ in range(CALLS):
                dist.all_reduce(values) if carry is None else carry(values)

        numbers = deadline.rounds(8, deadline.until(float("inf"), 1.0), discarded=2)
        found = [ranks.timed(reduce) for _ in numbers][2:]
        seconds = ranks.slowest({"": [median(found) / CALLS]})[""][0]
        size = ranks.world_size
        bus = 2 * (size - 1) / size * (mib << 20) / seconds / 1e9
        rows.append({"ranks": size, "bytes": mib << 20, "seconds": seconds, "bus": bus})
    return rows


if __name__ == "__main__":
    main()
