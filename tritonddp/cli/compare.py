"""Time a script with torch's class and with tritonddp's, and compare their gradients.

The script is not edited. Both contenders run at the same time on this machine and take turns, so
that both see the same noise: docs/try.md says how, and what the verdict means.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from tritonddp.cli.comparison.turns import Job, Launches, Played, ScriptError
from tritonddp.cli.comparison.verdict import LEAST_LAUNCHES, Ratio
from tritonddp.cli.terminal import RANKS, Progress, ranks, whole

if TYPE_CHECKING:  # it imports torch
    from tritonddp.cli.comparison.report import Comparison

# A Unix socket's path has 107 bytes at most, of which 34 are for its folder here and its name.
_LONGEST = 73


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command, and those of the script."""
    add = parser.add_argument
    several = "ranks, as torchrun takes it (default: %(default)s)"
    add("--nproc-per-node", "--nproc_per_node", type=ranks, default=RANKS, help=several)
    seconds = "seconds for all, after the script has started the first time (default: %(default)s)"
    add("--seconds", type=whole(0), default=120, metavar="S", help=seconds)
    within = "percent to which the ratio is to be known; then it stops (default: %(default)s)"
    add("--within", type=whole(1), default=2, metavar="P", help=within)
    alone = "whole launches in turn, where there is no memory for two models: noisier"
    add("--one-at-a-time", action="store_true", help=alone)
    against = "what runs beside stock; stock itself tells what is noise (default: %(default)s)"
    add("--against", choices=("tritonddp", "stock"), default="tritonddp", help=against)
    add("--html", type=Path, metavar="FILE", help="write a report with pictures, in one file")
    add("--json", action="store_true", help="print one JSON object, and nothing else on stdout")
    add("-m", "--module", action="store_true", help="the script is the name of a module")
    add("script", help="the training script, as torchrun takes it")
    add("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def main(arguments: argparse.Namespace) -> int:
    """Compare, and print the report; returns the exit code."""
    if obstacle := _obstacle(arguments):
        print(f"tritonddp compare: error: {obstacle}", file=sys.stderr)
        return 2
    # As Ctrl-C does, it ends all that was started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        comparison = _compared(arguments)
    except ScriptError as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}))
        print(f"tritonddp compare: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("tritonddp compare: interrupted", file=sys.stderr)
        return 130
    return 1 if comparison.has_findings else 0


def _obstacle(arguments: argparse.Namespace) -> str:
    """Why this cannot be carried out; empty if it can."""
    if not arguments.module and not Path(arguments.script).is_file():
        return f"there is no file {arguments.script}"
    if arguments.html is not None and not arguments.html.parent.is_dir():
        return f"there is no folder {arguments.html.parent}"
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST:
        return (
            "the name of the folder for temporary files is too long for a Unix socket in it: set "
            f"TMPDIR to one of {_LONGEST} characters or fewer"
        )
    return ""


def _compared(arguments: argparse.Namespace) -> Comparison:
    """Launch until the ratio is known or the time is over; shows the first table and the last."""
    progress, (load, _, _) = Progress(), os.getloadavg()
    command = ["--nproc-per-node", arguments.nproc_per_node]
    command += ["-m"] * arguments.module + [arguments.script, *arguments.script_arguments]
    job = Job(command, arguments.against)
    progress.say(
        f"compare {arguments.script} with stock DDP and with {job.labels[1]}: gradients, and times "
        f"in turns, {arguments.nproc_per_node} ranks each"
    )
    progress.say(
        f"about {LEAST_LAUNCHES} to 10 launches of both, until the ratio of their steps is known "
        f"to {arguments.within} %, or for {arguments.seconds} s after the script has started; the "
        "first gives a first table. Ctrl-C ends all"
    )
    # It imports torch: while the script starts, so that nobody waits for it.
    loading = Thread(target=import_module, args=("tritonddp.cli.comparison.page",))
    loading.start()
    played: list[list[Played]] = []
    with tempfile.TemporaryDirectory(prefix="tritonddp-compare-") as folder:
        launches = Launches(job, Path(folder), progress)
        while True:
            number, began = len(played) + 1, time.monotonic()
            progress.say(f"launch {number} starts")
            played.append(launches.play(not arguments.one_at_a_time))
            loading.join()
            from tritonddp.cli.comparison.report import Comparison, times

            now = time.monotonic()
            fitting = round((launches.started + arguments.seconds - now) / (now - began))
            ratio, last = Ratio.over(times(played)), Ratio.over(times(played[-1:]))
            stopped = _stopped(ratio, number, fitting, arguments)
            rest = "" if stopped else f"; at most {fitting} more launches, {now - began:.0f} s each"
            progress.say(f"launch {number}: ratio {last.value:.3f}; all so far {ratio}{rest}")
            if number == 1 or stopped:
                assert launches.plan is not None
                typed, ranks = shlex.join(["tritonddp", *sys.argv[1:]]), launches.world_size
                comparison = Comparison(
                    *(typed, job, launches.plan, played, ranks, stopped, load, progress.seconds)
                )
                _show(comparison, arguments)
            if stopped:
                return comparison


def _stopped(ratio: Ratio, launches: int, fitting: int, arguments: argparse.Namespace) -> str:
    """Why there are no more launches; empty if there are."""
    if launches >= LEAST_LAUNCHES and 100 * ratio.reach <= arguments.within:
        return f"Known to {arguments.within} % after {launches} launches."
    if fitting < 1 and launches != 2:  # Student's interval of two says nothing
        return (
            f"The time was over ({arguments.seconds} s) before the ratio was known to "
            f"{arguments.within} %: a longer --seconds tells more."
        )
    return ""


def _show(comparison: Comparison, arguments: argparse.Namespace) -> None:
    """Print the report, and write the file; both are there from the first launch on."""
    from tritonddp.cli.comparison.page import page
    from tritonddp.cli.comparison.report import as_json, text

    if not arguments.json:
        print("\n".join(text(comparison)), flush=True)
    elif comparison.stopped:
        print(json.dumps(as_json(comparison), allow_nan=False))
    if arguments.html is not None:
        arguments.html.write_text(page(comparison), encoding="utf-8")
