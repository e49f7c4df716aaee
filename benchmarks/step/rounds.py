"""Interleaved rounds: each round runs every configuration's backward once, in shuffled order."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from operator import add
from typing import Any

from torch import nn

from benchmarks.base import deadline
from benchmarks.base.paired import Spread
from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Batch, Case, loss
from benchmarks.models.configurations import Configuration
from benchmarks.step.plan import DISCARDED, SETTLED, Plan

# Seconds by configuration, build and round.
Seconds = dict[str, list[list[float]]]


class Rounds:
    """The rounds of one model.

    Args:
        end: deadline, by ``time.monotonic()``.

    Attributes:
        forward: seconds of forwards on this rank so far.
        backward: seconds of backwards on this rank so far.
    """

    def __init__(
        self,
        case: Case,
        configurations: Sequence[Configuration],
        ranks: Ranks,
        plan: Plan,
        end: float = math.inf,
    ) -> None:
        self.forward: Seconds = {each.name: [] for each in configurations}
        self.backward: Seconds = {each.name: [] for each in configurations}
        self._case = case
        self._configurations = configurations
        self._ranks = ranks
        self._plan = plan
        self._end = end
        self._builds_left = plan.builds

    def builds(self) -> Iterator[dict[str, nn.Module]]:
        """See :func:`builds`; collective."""
        plan = self._plan
        for left, models in builds(
            self._case, self._configurations, self._ranks, plan.builds, self._end
        ):
            self._builds_left = left
            yield models

    def settle(self, models: dict[str, nn.Module], earlier: int = 0) -> None:
        """Run steps, in addition to ``earlier`` ones, until the state is steady; collective."""
        batch = self.batch(0)
        for _ in range(SETTLED[self._ranks.device.type] - earlier):
            for model in models.values():
                model.zero_grad(set_to_none=True)
                loss(model, batch).backward()
        self._ranks.synchronize()

    def run(self, models: dict[str, nn.Module]) -> None:
        """Time the rounds of one build; collective.

        Forward and backward are each timed from a barrier until this rank's device is idle. The
        choices of a batch, such as its experts, are the same for all configurations within a round.
        """
        batch = self.batch(0)

        def numbers() -> Iterator[int]:
            nonlocal batch
            end = deadline.until(self._end, 1 / self._builds_left)
            discarded = DISCARDED[self._ranks.device.type]
            for number in deadline.rounds(
                self._plan.rounds, end, discarded=discarded, agreed=self._ranks.agreed
            ):
                if self._case.unused:
                    batch = self.batch(number)
                yield number

        def step(model: nn.Module) -> tuple[float, float]:
            forward, value = self._timed(partial(loss, model, batch))
            model.zero_grad(set_to_none=True)
            return forward, self._timed(value.backward)[0]

        ways = {name: partial(step, model) for name, model in models.items()}
        seed = f"{self._case.name} {self._builds_left}"
        for name, samples in deadline.interleaved(ways, numbers(), seed).items():
            self.forward[name].append([forward for forward, _ in samples])
            self.backward[name].append([backward for _, backward in samples])

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds of a call, and its result; collective."""
        self._ranks.barrier()
        start = time.perf_counter()
        result = call()
        self._ranks.synchronize()
        return time.perf_counter() - start, result

    def gathered(self) -> tuple[Seconds, Seconds, dict[str, Any]]:
        """Return backwards and steps of the slowest rank, and the content for JSON; collective.

        The content has raw seconds by rank, configuration, build and round.
        """
        forward, backward = map(self._ranks.gathered, (self.forward, self.backward))
        seconds = slowest(backward)
        steps = added(slowest(forward), seconds)
        content = {
            "rounds": counted(seconds),  # in each build
            "seconds": {name: asdict(Spread.of(flat(each))) for name, each in seconds.items()},
            "step_seconds": {name: asdict(Spread.of(flat(each))) for name, each in steps.items()},
            "raw_seconds_per_rank": backward,
            "raw_forward_seconds_per_rank": forward,
        }
        return seconds, steps, content

    def batch(self, number: int) -> Batch:
        """Return the batch of this rank for round ``number``."""
        seed = 1_000_000 + number * self._ranks.world_size + self._ranks.rank
        return self._case.batch(self._ranks.device, seed)


def builds(
    case: Case, configurations: Sequence[Configuration], ranks: Ranks, count: int, end: float
) -> Iterator[tuple[int, dict[str, nn.Module]]]:
    """Yield the number of builds left, and models by name, wrapped in shuffled order; collective.

    There are ``count`` builds. Do not keep the models: they are released when the next build is
    requested. A build is skipped if less than half of its time is left until ``end``.
    """
    start, shuffle = time.monotonic(), random.Random(case.name)  # the same on all ranks
    for build in range(count):
        copies = case.copies(ranks.device)
        order = shuffle.sample(configurations, len(configurations))
        models = {each.name: each.wrap(next(copies)) for each in order}
        copies.close()  # otherwise one more model would stay alive
        yield count - build, models
        models.clear()
        gc.collect()
        now = time.monotonic()
        half = (now - start) / (build + 1) / 2
        if end < math.inf and ranks.agreed(now + half > end):
            return


def slowest(per_rank: Sequence[Seconds]) -> Seconds:
    """Return the time of the slowest rank in each round."""
    return {
        name: [
            list(map(max, zip(*builds, strict=True)))
            for builds in zip(*(seconds[name] for seconds in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


def added(forward: Seconds, backward: Seconds) -> Seconds:
    """Return whole steps. A barrier separates the parts, so the slowest times add up."""
    return {
        name: [list(map(add, *build)) for build in zip(forward[name], backward[name], strict=True)]
        for name in forward
    }


def counted(seconds: Seconds) -> list[int]:
    """Return the number of rounds in each build."""
    return [len(build) for build in next(iter(seconds.values()))]


def flat(builds: Sequence[Sequence[float]]) -> list[float]:
    """Return the rounds of all builds in one list."""
    return [value for build in builds for value in build]
