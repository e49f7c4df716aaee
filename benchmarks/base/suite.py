"""What the scripts of kernels and the host share: groups of rows, measured one after the other."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.deadline import shares
from benchmarks.base.results import Result


@dataclass(frozen=True)
class Row:
    """One line of a result: its name, seconds of each round, and whatever else is known."""

    name: str
    seconds: list[float]
    info: dict[str, Any]


# The rows of a group, in so many rounds, until a time.
Measure = Callable[[int, float], Iterable[Row]]


def run(
    doc: str, benchmark: str, groups: Mapping[str, Measure], rounds: int, show: Callable[..., Any]
) -> int:
    """The command of a suite; returns the exit status.

    The result file is written after each group. A group that fails is told and left out; the others
    are measured, and the exit status is 1.

    Args:
        doc: of the script.
        benchmark: its name in the result file.
        rounds: the default of ``--rounds``.
        show: lines that show a result.
    """
    parser = command.parser(doc, rounds)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="in a group's name")
    options = parser.parse_args()
    only = options.only
    wanted = [name for name in groups if not only or any(word in name for word in only)]
    if not wanted:
        parser.error(f"no group is called so: {', '.join(groups)}")
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
