"""How much a benchmark in rounds measures, from its command line to its result file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadline import share
from models import CASES, SIZES, Case, default_names
from ranks import Ranks

# Rounds before the timed ones of each build. torch and tritonddp rebuild their buckets after the
# first backward, and allocators come to rest. On a GPU stock also records events for its own
# statistics in its first steps (10 of them, and every 100th), which would be held against it.
DISCARDED = {"cpu": 3, "cuda": 11}


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        models: names of cases; none for the default of the device.
        rounds: timed ones of each build, fewer if a deadline comes first.
        builds: how often all models are built anew, so that where memory lies is sampled too.
        size: of the batches, one of ``models.SIZES``.
        zeros: gradients are zeroed in place, not by setting them to None.
    """

    models: tuple[str, ...]
    rounds: int
    builds: int
    size: str
    zeros: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        return cls(
            tuple(options.models), options.rounds, options.builds, options.batch, options.zeros
        )

    def cases(self, ranks: Ranks) -> Iterator[tuple[Case, float]]:
        """Each case, and when it should be done: it gets its share of the time that is left."""
        names = self.models or default_names(ranks.device)
        for index, name in enumerate(names):
            yield CASES[name], share(1 / (len(names) - index))

    def summary(self, ranks: Ranks) -> str:
        return (
            f"{ranks.world_size} ranks over {ranks.backend} on {ranks.device.type}, "
            f"at most {self.builds} builds of {self.rounds} rounds, "
            f"{DISCARDED[ranks.device.type]} more discarded, {self.size} batches, "
            f"gradients zeroed to {self._zeroed_to}"
        )

    def content(self, ranks: Ranks) -> dict[str, Any]:
        """The same for the result file."""
        return {
            "world_size": ranks.world_size,
            "backend": ranks.backend,
            "device": ranks.device.type,
            "rounds": self.rounds,
            "builds": self.builds,
            "discarded": DISCARDED[ranks.device.type],
            "batch": self.size,
            "zero_grad_to": self._zeroed_to,
        }

    @property
    def _zeroed_to(self) -> str:
        return "zeros" if self.zeros else "None"


def parser(description: str, rounds: int, models: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The arguments of :meth:`Plan.of`, ``--backend`` and ``--out``.

    ``rounds`` and ``models`` are defaults; no models: those that the device takes.
    """
    default = " ".join(models) or "the first five on a CPU, else all"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=CASES,
        default=models,
        metavar="NAME",
        help=f"of {', '.join(CASES)} (default: {default})",
    )
    parser.add_argument(
        "--rounds", type=_positive, default=rounds, help=f"timed, per build (default {rounds})"
    )
    parser.add_argument("--builds", type=_positive, default=3, help="of all models (default 3)")
    parser.add_argument("--batch", choices=SIZES, default="small", help="size of the batches")
    parser.add_argument("--backend", help="default: nccl with a CUDA device, else gloo")
    parser.add_argument(
        "--zeros", action="store_true", help="zero gradients in place, not by setting them to None"
    )
    parser.add_argument("--out", type=Path, help="write JSON with the raw rounds here")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1, but is {value}")
    return value
