"""Interleaved rounds: every configuration's backward once in each, in an order shuffled anew."""

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

# Seconds by configuration, then by build, then by round.
Seconds = dict[str, list[list[float]]]


class Rounds:
    """The rounds of one model.

    Args:
        end: when they should be done, by ``time.monotonic()``. The first build has a few rounds
            in any case; another is left out if there is no time for half of one.

    Attributes:
        forward: seconds of this rank so far, and
        backward: likewise.
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
        self._configurations = list(configurations)
        self._ranks = ranks
        self._plan = plan
        self._end = end
        self._builds_left = plan.builds
        self._shuffle = random.Random(case.name)  # the same on all ranks

    def builds(self) -> Iterator[dict[str, nn.Module]]:
        """All configurations' models by name, wrapped in an order shuffled anew; collective.

        They are let go when the next build is asked for: keep none.
        """
        start = time.monotonic()
        while self._builds_left > 0:
            self._shuffle.shuffle(self._configurations)
            copies = self._case.copies(self._ranks.device)
            models = {each.name: each.wrap(next(copies)) for each in self._configurations}
            copies.close()  # or one model more would live on
            yield models
            models.clear()
            gc.collect()
            self._builds_left -= 1
            now = time.monotonic()
            half = (now - start) / (self._plan.builds - self._builds_left) / 2
            if self._end < math.inf and self._ranks.agreed(now + half > self._end):
                return

    def settle(self, models: dict[str, nn.Module], earlier: int = 0) -> None:
        """Steps until all is as it stays, with those that were ``earlier``; collective."""
        batch = self.batch(0)
        for _ in range(SETTLED[self._ranks.device.type] - earlier):
            for model in models.values():
                model.zero_grad(set_to_none=True)
                loss(model, batch).backward()
        self._ranks.synchronize()

    def run(self, models: dict[str, nn.Module]) -> None:
        """Time the rounds of one build; collective.

        Forward and backward are timed each from a barrier until this rank's device is idle. What
        differs between batches, the experts they go through, is the same for all within a round.
        """
        discarded = DISCARDED[self._ranks.device.type]
        forward: dict[str, list[float]] = {name: [] for name in models}
        backward: dict[str, list[float]] = {name: [] for name in models}
        order = list(models)
        batch = self.batch(0)
        end = deadline.until(self._end, 1 / self._builds_left)
        for number in deadline.rounds(
            self._plan.rounds, end, discarded=discarded, agreed=self._ranks.agreed
        ):
            if self._case.unused:
                batch = self.batch(number)
            self._shuffle.shuffle(order)
            for name in order:
                model = models[name]
                elapsed, value = self._timed(partial(loss, model, batch))
                forward[name].append(elapsed)
                model.zero_grad(set_to_none=True)
                elapsed, _ = self._timed(value.backward)
                backward[name].append(elapsed)
                del value  # its graph is not to go while the next model is timed
        for name in models:
            self.forward.setdefault(name, []).append(forward[name][discarded:])
            self.backward.setdefault(name, []).append(backward[name][discarded:])

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of a call and what it returns; collective."""
        self._ranks.barrier()
        start = time.perf_counter()
        result = call()
        self._ranks.synchronize()
        return time.perf_counter() - start, result

    def gathered(self) -> tuple[Seconds, Seconds, dict[str, Any]]:
        """Backwards and whole steps, of the slowest rank, and what JSON says of both; collective.

        The raw seconds in it are by rank, configuration, build and round.
        """
        forward, backward = map(self._ranks.gathered, (self.forward, self.backward))
        seconds = slowest(backward)
        steps = added(slowest(forward), seconds)
        content = {
            "rounds": counted(seconds),  # of each build
            "seconds": {name: asdict(Spread.of(flat(each))) for name, each in seconds.items()},
            "step_seconds": {name: asdict(Spread.of(flat(each))) for name, each in steps.items()},
            "raw_seconds_per_rank": backward,
            "raw_forward_seconds_per_rank": forward,
        }
        return seconds, steps, content

    def batch(self, number: int) -> Batch:
        """The batch of this rank for round ``number``."""
        seed = 1_000_000 + number * self._ranks.world_size + self._ranks.rank
        return self._case.batch(self._ranks.device, seed, self._plan.size)


def slowest(per_rank: Sequence[Seconds]) -> Seconds:
    """A round takes as long as its slowest rank."""
    return {
        name: [
            list(map(max, zip(*builds, strict=True)))
            for builds in zip(*(seconds[name] for seconds in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


def added(forward: Seconds, backward: Seconds) -> Seconds:
    """Whole steps. There is a barrier in between, so that slowest parts add up."""
    return {
        name: [list(map(add, *build)) for build in zip(forward[name], backward[name], strict=True)]
        for name in forward
    }


def counted(seconds: Seconds) -> list[int]:
    """How many rounds each build has had."""
    return [len(build) for build in next(iter(seconds.values()))]


def flat(builds: Sequence[Sequence[float]]) -> list[float]:
    """The rounds of all builds in one list."""
    return [value for build in builds for value in build]
