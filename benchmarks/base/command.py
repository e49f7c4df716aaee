"""What the commands of all benchmarks share: options, what is printed, and the result file."""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.base import machine
from benchmarks.base.deadline import shares
from benchmarks.base.results import Result


def parser(
    doc: str | None,
    rounds: int | None = None,
    models: tuple[Iterable[str], Sequence[str]] | None = None,
    backend: bool = False,
    out: str | None = None,
) -> argparse.ArgumentParser:
    """The first line of a docstring, ``--out``, and of the common options those that are given.

    Args:
        rounds: the default of ``--rounds``.
        models: the choices of ``--models``, and the default.
        backend: whether there is ``--backend``.
        out: what ``--out`` is, if it must be given.
    """
    made = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    if models is not None:
        choices, default = map(list, models)
        what = f"of {', '.join(choices)} (default: {' '.join(default) or 'those of the device'})"
        made.add_argument(
            "--models", nargs="+", choices=choices, default=default, metavar="NAME", help=what
        )
    if rounds is not None:
        what = f"timed (default {rounds})"
        made.add_argument("--rounds", type=positive, default=rounds, help=what)
    if backend:
        what = "default: nccl with a CUDA device, else gloo"
        made.add_argument("--backend", help=what)
    made.add_argument("--out", type=Path, required=out is not None, help=out or "write JSON here")
    return made


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1, but is {value}")
    return value


class Output:
    """What a benchmark prints and writes, on rank 0 alone.

    Args:
        path: of the result file; ``None`` for none.
        is_first: rank 0, or the only process there is.
        heading: what the file says of everything.
    """

    def __init__(
        self, benchmark: str, path: Path | None, is_first: bool = True, **heading: Any
    ) -> None:
        self._path, self._is_first = path, is_first
        facts = machine.describe()
        self.content: dict[str, Any] = {"benchmark": benchmark, "machine": facts, **heading}
        self.say(machine.summary(facts))

    def say(self, *lines: str) -> None:
        if self._is_first:
            print("\n".join(lines), flush=True)

    def write(self, found: Mapping[str, Any]) -> None:
        """To be called after each model, say: whatever cuts the run off, what was there is kept."""
        self.content |= {**found, "load_average_after": os.getloadavg()}
        if self._is_first and self._path is not None:
            machine.write_json(self._path, self.content)

    def only(self, key: str, name: str) -> Result:
        """What has been found of one model, say, as a result for tables."""
        return Result({**self.content, key: {name: self.content[key][name]}})

    def end(self) -> None:
        if self._path is not None:
            self.say(f"\nwritten to {self._path}")


# Kernels and the host: groups of rows, measured one after the other.


@dataclass(frozen=True)
class Row:
    """One line of a result: its name, seconds of each round, and whatever else is known."""

    name: str
    seconds: list[float]
    info: dict[str, Any]


# The rows of a group, in so many rounds, until a time.
Measure = Callable[[int, float], Iterable[Row]]


def run_suite(
    doc: str, benchmark: str, groups: Mapping[str, Measure], rounds: int, show: Callable[..., Any]
) -> int:
    """The command of a suite; returns the exit status.

    The result file is written after each group. A group that fails is told and left out; the others
    are measured, and the exit status is 1. ``show`` gives the lines that show a result.
    """
    made = parser(doc, rounds)
    made.add_argument("--only", nargs="+", default=[], metavar="WORD", help="in a group's name")
    options = made.parse_args()
    wanted = [name for name in groups if any(word in name for word in options.only or [""])]
    if not wanted:
        made.error(f"no group is called so: {', '.join(groups)}")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # what torchrun gives a rank
    output = Output(benchmark, options.out)
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for group, end in shares(wanted):
        try:
            rows += [_content(group, row) for row in groups[group](options.rounds, end)]
        except Exception as error:  # the other groups are worth more than it
            traceback.print_exc()
            failed[group] = f"{type(error).__name__}: {error}"
        output.write({"benchmarks": rows, "failed": failed})
    output.say(
        *show(Result(output.content)), *(f"FAILED {group}: {why}" for group, why in failed.items())
    )
    return 1 if failed else 0


def _content(group: str, row: Row) -> dict[str, Any]:
    """A row of the result file. (Its form is that of pytest-benchmark, which once wrote it.)"""
    stats = {"rounds": len(row.seconds), "median": median(row.seconds), "data": row.seconds}
    return shortened({"group": group, "name": row.name, "extra_info": row.info, "stats": stats})


def shortened(value: Any) -> Any:
    """Numbers to 6 digits: no clock shows more, and files with raw rounds stay small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return value
