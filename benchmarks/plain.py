"""The suites of kernels and the host.

    python benchmarks/plain.py SUITE [--only WORD ...] [--rounds N]
        [--out FILE]

SUITE is kernels or host. ``--only`` wants one of its words in a case's name. The result
file is written after each group. A group that fails is told and left out; the others are measured,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this tree, whatever is installed

import torch

from benchmarks.base import machine
from benchmarks.base.results import Result
from benchmarks.base.suite import Row, groups_from, shortened
from benchmarks.report.table import text

SUITES = {
    "kernels": "benchmarks.kernels.bandwidth",
    "host": "benchmarks.host.cost",
}


def main() -> int:
    options = _options()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # what torchrun gives a rank
    suite: Any = importlib.import_module(SUITES[options.suite])
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    cases = [
        case
        for case in suite.cases()
        if not options.only or any(word in case.name for word in options.only)
    ]
    if not cases:
        print(f"no case of {options.suite} is called so")
        return 1
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with getattr(suite, "session", contextlib.nullcontext)():
        for number, case in enumerate(cases):
            if case.group in failed:
                continue
            try:
                row = suite.row(case, options.rounds, groups_from(cases, case))
            except Exception as error:  # the other groups are worth more than it
                traceback.print_exc()
                failed[case.group] = f"{type(error).__name__}: {error}"
            else:
                rows.append(_content(case.group, case.name, row))
            is_last = number + 1 == len(cases) or cases[number + 1].group != case.group
            if options.out is not None and (is_last or case.group in failed):
                now = machine.describe()
                content = {
                    "benchmark": options.suite,
                    "machine": {**facts, "torch_threads": now["torch_threads"]},
                    "load_average_after": now["load_average"],
                    "benchmarks": shortened(rows),
                    "failed": failed,
                }
                machine.write_json(options.out, content)
    for table in suite.TABLES:
        print("\n".join(text(table(Result({"benchmarks": rows})))), flush=True)
    for group, why in failed.items():
        print(f"FAILED {group}: {why}")
    return 1 if failed else 0


def _content(group: str, name: str, row: Row) -> dict[str, Any]:
    """A row of the result file. (Its form is that of pytest-benchmark, which once wrote it.)"""
    return {
        "group": group,
        "name": name,
        "fullname": name,
        "extra_info": row.info,
        "stats": {
            "rounds": len(row.seconds),
            "median": statistics.median(row.seconds),
            "data": row.seconds,
        },
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="in a case's name")
    parser.add_argument("--rounds", type=int, help="timed, of each group (default: the suite's)")
    parser.add_argument("--out", type=Path, help="write JSON here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
