"""The benchmarks of ``make gpu`` with as little in them as can be, for a rehearsal.

The names stay, so that the command lines are those of a GPU: of models, of lists of parameters, of
buckets. Only what they stand for is small, and there are few rounds.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROUNDS = 2
SHAPES = ((8, 5), (3,), (16, 16), (2100,))  # the last one makes two chunks
LISTS = ("many_small",)  # as all are alike here


def make_small() -> None:
    """Before a benchmark is run in this process."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.base import deadline
    from benchmarks.host import subjects
    from benchmarks.kernels import shapes, timing
    from benchmarks.models import cases
    from benchmarks.step import plan

    shapes.whole = lambda name: SHAPES
    shapes.LISTS = LISTS
    shapes.BUCKETS["25MiB"] = lambda given, dtype: given[:2]
    for name, case in list(cases.CASES.items()):
        cases.CASES[name] = cases.Case(name, _model, _batch, (2, 4), case.unused)
    plan.DISCARDED["cuda"] = timing.WARMUPS = subjects.WARMUPS = 1
    subjects.PARAMETERS, subjects.PER_BUCKET = 24, 6
    rounds = deadline.rounds

    def few(most: int, *args: Any, **kwargs: Any) -> Iterator[int]:
        return rounds(min(most, ROUNDS), *args, **kwargs)

    deadline.rounds = few


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))


def _batch(generator: torch.Generator, examples: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn((2, examples, 6), generator=generator))  # type: ignore[return-value]
