"""The extent of a benchmark in rounds, from its command line to its result file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.deadline import shares
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.base.results import Result
from benchmarks.models.cases import CASES, Case, default_names
from benchmarks.models.gradients import WrongGradients

# Rounds before the timed rounds of each build, at most a third of all rounds. torch and tritonddp
# rebuild their buckets after the first backward, and allocators reach a steady state.
DISCARDED = {"cpu": 3, "cuda": 1}
# Untimed steps before these rounds. On a GPU, stock records events for its statistics in its first
# 10 steps and in every 100th step, which would count against it. The logging data of ours measures
# as many steps, in which a world of one also exchanges.
SETTLED = {"cpu": 0, "cuda": 11}


@dataclass(frozen=True)
class Plan:
    """The models, rounds and builds of a benchmark."""

    models: tuple[str, ...]  # names of cases; empty for the default of the device
    rounds: int  # timed rounds of each build, fewer if a deadline comes first
    builds: int  # how often all models are rebuilt, to sample memory layouts

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        return cls(tuple(options.models), options.rounds, options.builds)

    def summary(self, ranks: Ranks) -> str:
        return (
            f"{ranks.world_size} ranks over {ranks.backend} on {ranks.device.type}, "
            f"at most {self.builds} builds of {self.rounds} rounds, "
            f"{DISCARDED[ranks.device.type]} more discarded, behind "
            f"{SETTLED[ranks.device.type]} steps"
        )

    def content(self, ranks: Ranks) -> dict[str, Any]:
        """Return the plan for the result file."""
        return {
            "world_size": ranks.world_size,
            "backend": ranks.backend,
            "device": ranks.device.type,
            "rounds": self.rounds,
            "builds": self.builds,
            "discarded": DISCARDED[ranks.device.type],
            "settled": SETTLED[ranks.device.type],
        }


def parser(doc: str, rounds: int, models: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of the arguments for :meth:`Plan.of`, ``--backend`` and ``--out``.

    ``rounds`` and ``models`` are defaults; without models, those for the device.
    """
    made = command.parser(doc, rounds, (CASES, models), backend=True)
    made.add_argument(
        "--builds", type=command.positive, default=3, help="of all models, with the rounds of each"
    )
    return made


def _too_large(ranks: Ranks) -> tuple[type[Exception], ...]:
    """Return the errors of a too small GPU; none for several ranks: one might continue alone."""
    return (torch.OutOfMemoryError,) if ranks.world_size == 1 else ()


# Measures one case until a deadline, and returns its JSON content, which is also printed.
Measure = Callable[[Case, Ranks, Plan, float], dict[str, Any]]
Show = Callable[[Result], Iterable[str]]


def run(
    benchmark: str,
    options: argparse.Namespace,
    measure: Measure,
    show: Show,
    refused: tuple[type[Exception], ...] = (WrongGradients,),
    **heading: Any,
) -> tuple[int, dict[str, Any]]:
    """Measure all cases, each in its share of the time.

    Args:
        refused: errors that concern one model only: all ranks raise them, and the next model can
            be measured.

    Returns:
        An exit status, and the results of all models.
    """
    plan, models = Plan.of(options), {}
    with process_group(options.backend) as ranks:
        more = {**heading, **plan.content(ranks)}
        output = Output(benchmark, options.out, ranks.rank == 0, **more)
        output.say(plan.summary(ranks))
        for name, end in shares(plan.models or default_names(ranks.device)):
            try:
                models[name] = measure(CASES[name], ranks, plan, end)
            except (*refused, *_too_large(ranks)) as error:
                models[name] = {"error": str(error)}
            output.write({"models": models})
            if ranks.rank == 0:
                output.say("", *show(output.only("models", name)))
        output.end()
    return int(any("error" in model for model in models.values())), models
