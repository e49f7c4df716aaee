"""What it costs to detect unused parameters: the same backward asking, and told the answer.

    python benchmarks/features/detection.py [--rounds N] [--models many_small ...] [--out FILE]

Starts two ranks by itself, unless torchrun has. In the rounds (see step.py) a wrapped model runs
under several names: as it is, so that its reducer asks the engine which parameters the backward
will reach; and *told*, with the answer found beforehand in place of the question, and nothing else
changed. As it is one model, where memory happens to lie is the same for both. (What stock DDP pays
for its search is measured by step.py on ``branchy``.)

Before any timing, gradients of all names are compared, the answer that is told is held against the
engine's, and it is counted who asks. The flags in the trailers of the buckets are there on both
sides: they are counted and timed by themselves.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import processes
from benchmarks.base.ranks import Ranks
from benchmarks.base.results import Result
from benchmarks.models.cases import Batch, Case, loss
from benchmarks.models.configurations import UNWRAPPED, Configuration, Family, families
from benchmarks.models.gradients import WrongGradients, check
from benchmarks.report import tables
from benchmarks.report.table import Table, ms, quartiles, text
from benchmarks.step.comparison import Bound, Comparison
from benchmarks.step.plan import Plan, parser, run
from benchmarks.step.rounds import Rounds
from benchmarks.step.traffic import bucket_bytes
from tritonddp import DistributedDataParallel, _torch
from tritonddp.cli.kernel_timing.paired import Spread

MODELS = ("many_small", "branchy")
ASKING = Bound("ratio", 1.02)  # the backward that asks / the one that is told
PART_ROUNDS = 15  # of the query and the flags by themselves: they take less than a second

Query = Callable[[], list[bool] | None]


class UnfairError(RuntimeError):
    """The side that is told does not do what the other does but for asking; on all ranks."""


class Side(nn.Module):
    """A wrapped model under one of its names.

    Args:
        wrapped: the model, which other sides have too.
        told: knows what the engine would answer; ``None`` for the side that asks.
    """

    def __init__(self, wrapped: DistributedDataParallel, told: Answers | None = None) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.told = told
        self.query: Query | None = None if told is None else told.given

    def forward(self, inputs: Any) -> Tensor:
        if self.told is not None:
            self.told.find(inputs)
        outputs = self.wrapped(inputs)
        # Behind the forward: what the reducer asks may be made anew there.
        tracker = self.tracker
        tracker.query = self.query or partial(_ask, tracker)
        return outputs

    @property
    def tracker(self) -> Any:
        """What the reducer asks: the one thing of its insides that is known here."""
        return self.wrapped._ddp_state.core.tracker


def _ask(tracker: Any) -> list[bool] | None:
    """What the reducer does when it asks."""
    return _torch.will_engine_execute(tracker.nodes)


class Answers:
    """Which parameters a batch reaches, found on the unwrapped model.

    So nothing of the wrapped model is touched, and all sides find it in the caches, or not, alike.

    Args:
        unwrapped: a model with the parameters of ``wrapped``.
        wrapped: buckets are what they are to stay.
    """

    def __init__(self, unwrapped: nn.Module, wrapped: DistributedDataParallel) -> None:
        self._unwrapped = unwrapped
        self._params = list(unwrapped.parameters())
        number = {param: index for index, param in enumerate(wrapped.module.parameters())}
        # The engine is asked for the parameters in launch order.
        self._order = [
            number[param] for bucket in wrapped.reducer.buckets for param in bucket.params
        ]
        self._inputs: Any = None
        self._reached: list[bool] = []

    def find(self, inputs: Any) -> None:
        """From now on :meth:`given` is for these inputs; costs nothing if it is already."""
        if inputs is self._inputs:
            return
        outputs = self._unwrapped(inputs)
        grads = torch.autograd.grad(outputs.sum(), self._params, allow_unused=True)
        self._inputs = inputs
        self._reached = [grads[index] is not None for index in self._order]

    def given(self) -> list[bool]:
        """For each parameter, whether the backward will reach it."""
        return self._reached


def main() -> int:
    options = parser(__doc__, rounds=30, models=MODELS).parse_args()
    if "RANK" not in os.environ:
        # No host name needs to resolve; a thread for each rank.
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, *sys.argv]
        codes = processes.run(command, math.inf, sys.stdout.buffer, 2, environment)
        return next((1 if code is None else code for code in codes if code != 0), 0)
    return run("detection", options, measure, show, (WrongGradients, UnfairError))[0]


def measure(case: Case, ranks: Ranks, plan: Plan, end: float) -> dict[str, Any]:
    """Check, count and time all sides on one model until ``end``; what JSON says about it."""
    pairs = [_told(group) for group in families(case.unused)]
    rounds = Rounds(case, [UNWRAPPED, *(pair.ours for pair in pairs)], ranks, plan, end)
    agreement: dict[str, Any] = {}
    queries: dict[str, int] = {}
    parts: dict[str, Any] = {}
    for build, models in enumerate(rounds.builds()):
        add_sides(models, pairs, rounds.batch(0))
        queries = count_queries(models, [rounds.batch(0), rounds.batch(1)])
        if build == 0:
            alike = pairs[0].alike[0].name, pairs[0].alike[1].name
            agreement = check(models, case, ranks, alike[0], alike, plan.size)
        rounds.run(models, partial(_find, models))
        if build == 0:
            parts = {
                pair.name: {
                    "of": pair.stock[0].name,
                    **measure_parts(models[pair.ours.name], rounds, ranks),
                }
                for pair in pairs
            }
    seconds, _, content = rounds.gathered()
    bound = None if ranks.share_device else ASKING
    comparisons = [
        {
            "gradients": pair.name,
            "of": "backwards",
            # Where ranks take turns on one device, times are not worth a judgement.
            **Comparison.of(pair, seconds, seconds).judged(bound, sum(content["rounds"])),
        }
        for pair in pairs
    ]
    return {
        "gradients": {name: asdict(each) for name, each in agreement.items()},
        "queries": queries,
        "comparisons": comparisons,
        "parts": parts,
        **content,
    }


def _told(group: Family) -> Family:
    """Ours against itself when it is told, and that once more."""
    told = Configuration(f"{group.ours.name} told", None)
    again = Configuration(f"{told.name} again", None)
    return Family(group.name, group.ours, (told,), (told, again))


def add_sides(models: dict[str, nn.Module], pairs: list[Family], batch: Batch) -> None:
    """Put the sides of each wrapped model of ours in its place in ``models``; collective."""
    for pair in pairs:
        wrapped = models[pair.ours.name]
        assert isinstance(wrapped, DistributedDataParallel)
        _backward(wrapped, batch)  # buckets follow the order of its gradients
        answers = Answers(models[UNWRAPPED.name], wrapped)
        models[pair.ours.name] = Side(wrapped)
        for told in pair.alike:
            models[told.name] = Side(wrapped, answers)


def _find(models: dict[str, nn.Module], batch: Batch) -> None:
    """Find the answers that are told for a batch before anything is timed."""
    for side in models.values():
        if isinstance(side, Side) and side.told is not None:
            side.told.find(batch[0])


def count_queries(models: dict[str, nn.Module], batches: list[Batch]) -> dict[str, int]:
    """How often each side asks in a backward; collective.

    Raises:
        UnfairError: a side that is told asks, the other does not, or the answers differ.
    """
    counts: dict[str, int] = {}
    problems: list[str] = []
    for name, side in models.items():
        if not isinstance(side, Side):
            continue
        found = [asked(side, batch) for batch in batches]
        counts[name] = max(map(len, found))
        if side.told is None:
            if not all(found):
                problems.append(f"{name!r} does not ask: this is not what happens in training")
            continue
        if any(found):
            problems.append(f"{name!r} is told, but asks all the same")
        for batch in batches:
            engine = asked(Side(side.wrapped), batch)
            side.told.find(batch[0])
            if any(answer != side.told.given() for answer in engine):
                problems.append(f"what {name!r} is told is not what the engine answers")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, problems)
    if any(everywhere):
        raise UnfairError(f"nothing was timed: {everywhere}")
    return counts


def asked(side: Side, batch: Batch) -> list[list[bool] | None]:
    """What the engine answered in a backward, once for each time that it was asked; collective."""
    query = _torch.will_engine_execute
    answers: list[list[bool] | None] = []

    def recorded(nodes: Any) -> list[bool] | None:
        answers.append(query(nodes))
        return answers[-1]

    with mock.patch.object(_torch, "will_engine_execute", recorded):
        _backward(side, batch)
    return answers


def measure_parts(side: nn.Module, rounds: Rounds, ranks: Ranks) -> dict[str, Any]:
    """What detection is made of, on this rank, in backwards of its own; collective.

    Returns:
        Median seconds of the query within a backward (as the host sees it), and of writing and of
        reading the flags of all buckets, right after one. ``None`` for the writing where the
        flatten kernel does it. Bytes of the flags, and of all that is sent.
    """
    assert isinstance(side, Side)
    seconds: dict[str, list[float]] = {"query": [], "write_flags": [], "read_flags": []}
    timed = Side(side.wrapped)

    def timed_query() -> list[bool] | None:
        tracker = timed.tracker
        start = time.perf_counter()
        answer = _ask(tracker)
        seconds["query"].append(time.perf_counter() - start)
        return answer

    timed.query = timed_query
    buffers = [bucket.flat for bucket in side.wrapped.reducer.buckets]
    on_cpu = ranks.device.type == "cpu"
    for number in range(PART_ROUNDS):
        _backward(timed, rounds.batch(number))
        flags = [buffer.flags.tolist() for buffer in buffers]
        used = [[flag != 0 for flag in each] for each in flags]
        ranks.synchronize()
        start = time.perf_counter()
        if on_cpu:
            for buffer, each in zip(buffers, used, strict=True):
                buffer.write_trailer(each, bytes(buffer.layout.headers))
        written = time.perf_counter()
        for buffer in buffers:
            buffer.flags.tolist()
        seconds["read_flags"].append(time.perf_counter() - written)
        if on_cpu:
            seconds["write_flags"].append(written - start)
    return {
        **{
            part: Spread.of(samples).median if samples else None
            for part, samples in seconds.items()
        },
        "flag_bytes": sum(each.flags.numel() * each.flags.element_size() for each in buffers),
        "wire_bytes": sum(bucket_bytes(side.wrapped)),
    }


def _backward(model: nn.Module, batch: Batch) -> None:
    """A reduced backward, which leaves no gradients; collective."""
    loss(model, batch).backward()
    model.zero_grad(set_to_none=True)


def show(result: Result) -> Iterator[str]:
    """Lines that show the results of some models."""
    for name, model in result.models.items():
        rows = [
            (label, ms(spread.median), quartiles(spread), str(model.queries.get(label, "")))
            for label, spread in model.seconds.items()
        ]
        header = (f"{name}: {model.rounds} rounds", "backward, ms", "quartiles", "asks")
        yield from text([Table(header, rows)])
    yield from text([*tables.detection(result), *tables.detection_parts(result)])


if __name__ == "__main__":
    sys.exit(main())
