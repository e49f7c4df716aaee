"""Time a script with torch's class and with tritonddp's, and compare their gradients.

The script is not edited. Both contenders run at the same time on this machine and take turns, so
that both see the same noise; a short script is run as a whole, again and again. What it saves with
torch.save, safetensors or torch.distributed.checkpoint goes to a folder of the launch in TMPDIR and
is loaded from there, so no launch overwrites or resumes from the files of another. Other files,
such as logs and those that the script opens itself, are written where it says. docs/try.md says how
the times are compared, and what the verdict means.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from tritonddp.cli.comparison.contender import OURS, ScriptError
from tritonddp.cli.comparison.turns import Launches
from tritonddp.cli.comparison.verdict import LEAST_LAUNCHES, Ratio
from tritonddp.cli.terminal import RANKS, Progress, ranks, whole

if TYPE_CHECKING:  # it imports torch
    from tritonddp.cli.comparison.report import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command and of the script."""
    add = parser.add_argument
    several = "ranks, as torchrun takes it (default: %(default)s)"
    add("--nproc-per-node", "--nproc_per_node", type=ranks, default=RANKS, help=several)
    seconds = "seconds for all, after the script has started the first time (default: %(default)s)"
    add("--seconds", type=whole(0), default=120, metavar="S", help=seconds)
    within = "percent to which the ratio is to be known; then it stops (default: %(default)s)"
    add("--within", type=whole(1), default=2, metavar="P", help=within)
    alone = "whole launches in turn, where there is no memory for two models: noisier"
    add("--one-at-a-time", action="store_true", help=alone)
    files = "let the script save its files where it says, and load them in the next launch"
    add("--keep-files", action="store_true", help=files)
    against = "what runs beside stock; stock itself tells what is noise (default: %(default)s)"
    add("--against", choices=(OURS, "stock"), default=OURS, help=against)
    add("--html", type=Path, metavar="FILE", help="write a report with pictures, in one file")
    add("--json", action="store_true", help="print one JSON object, and nothing else on stdout")
    add("-m", "--module", action="store_true", help="the script is the name of a module")
    add("script", help="the training script, as torchrun takes it")
    add("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def main(arguments: argparse.Namespace) -> int:
    """Compare, and print the report. Return the exit code."""
    if not hasattr(os, "getloadavg"):
        print(
            f"tritonddp compare: error: needs Linux or macOS, not {sys.platform}", file=sys.stderr
        )
        return 2
    missing = ""
    if not arguments.module and not Path(arguments.script).is_file():
        missing = f"file {arguments.script}"
    elif arguments.html is not None and not arguments.html.parent.is_dir():
        missing = f"folder {arguments.html.parent}"
    if missing:
        print(f"tritonddp compare: error: there is no {missing}", file=sys.stderr)
        return 2
    # Like Ctrl-C, SIGTERM ends all started processes.
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
    return 1 if comparison.has_findings else 3 if comparison.has_failed else 0


def _compared(arguments: argparse.Namespace) -> Comparison:
    """Launch until the ratio is known or the time is over. Show the first and the last table."""
    progress = Progress()
    script = ["-m"] * arguments.module + [arguments.script, *arguments.script_arguments]
    labels = ("stock", "stock again" if arguments.against == "stock" else arguments.against)
    progress.say(
        f"compare {arguments.script} with stock DDP and with {labels[1]}: gradients, and times "
        f"in turns, {arguments.nproc_per_node} ranks each"
    )
    progress.say(
        f"about {LEAST_LAUNCHES} to 10 launches of both, until the ratio of their steps is known "
        f"to {arguments.within} %, or for {arguments.seconds} s after the script has started; the "
        "first gives a first table. Ctrl-C ends all, and shows what is known"
    )
    if not arguments.keep_files:
        progress.say(
            "what the script saves with torch.save, safetensors or torch.distributed.checkpoint "
            "goes to a scratch folder, and your files stay as they are (--keep-files: not so)"
        )
    # It imports torch while the script starts, so that this takes no extra time.
    loading = Thread(target=import_module, args=("tritonddp.cli.comparison.page",))
    loading.start()
    with tempfile.TemporaryDirectory(prefix="tritonddp-compare-") as folder:
        launches = Launches(
            script,
            arguments.nproc_per_node,
            labels,
            Path(folder),
            progress,
            in_turns=not arguments.one_at_a_time,
            keeps_files=arguments.keep_files,
        )
        try:
            while True:
                number, began = len(launches.pairs) + 1, time.monotonic()
                progress.say(f"launch {number} starts")
                try:
                    launches.play()
                except ScriptError as error:
                    if not launches.pairs:
                        raise
                    return _shown(launches, f"Launch {number} does not count: {error}", arguments)
                loading.join()
                now = time.monotonic()
                fitting = round((launches.started + arguments.seconds - now) / (now - began))
                stopped = _stopped(launches, fitting, arguments)
                more = max(fitting, LEAST_LAUNCHES - number, 1)
                rest = "" if stopped else f"; at most {more} more of {now - began:.0f} s"
                progress.say(f"launch {number}: {_ratios(launches)}{rest}")
                if stopped or number == 1:
                    comparison = _shown(launches, stopped, arguments)
                if stopped:
                    return comparison
        except KeyboardInterrupt:
            if launches.pairs:
                stopped = f"Interrupted; launches until then: {len(launches.pairs)}."
                _shown(launches, stopped, arguments)
            elif arguments.json:
                print(json.dumps({"error": "interrupted"}))
            raise


def _ratios(launches: Launches) -> str:
    """Describe the ratios of the last launch, and of all launches so far."""
    pair = launches.pairs[-1]
    if pair.time is None:
        outcomes = zip(launches.labels, pair.outcomes or (), strict=False)
        return (
            ", ".join(f"{label} {of.how}" for label, of in outcomes)
            or "gradients alone, no times yet"
        )
    ratio, last = Ratio.over(launches.times), Ratio.over(launches.times[-1:])
    return f"ratio {last.value:.3f}; all so far {ratio}"


def _stopped(launches: Launches, fitting: int, arguments: argparse.Namespace) -> str:
    """Return why there are no more launches; empty if there are."""
    times, pair = launches.times, launches.pairs[-1]
    if pair.time is None and pair.outcomes is not None:
        return "Times are not compared."
    if not times:
        return ""
    ratio = Ratio.over(times)
    if len(times) >= LEAST_LAUNCHES and 100 * ratio.reach <= arguments.within:
        return f"Known to {arguments.within} % after {len(times)} launches."
    if fitting < 1 and len(times) != 2:  # Student's interval of two is meaningless
        longer = "a longer --seconds tells more"
        if not launches.in_turns:
            longer += ", and so does a script with more steps"
        return (
            f"In {arguments.seconds} s the ratio could not be known to {arguments.within} %: "
            f"{longer}."
        )
    return ""


def _shown(launches: Launches, stopped: str, arguments: argparse.Namespace) -> Comparison:
    """Print the report and write the file, both from the first launch on."""
    from tritonddp.cli.comparison.page import page
    from tritonddp.cli.comparison.report import Comparison, as_json, text

    comparison = Comparison(launches, stopped)
    if not arguments.json:
        print("\n".join(text(comparison)), flush=True)
    elif stopped:
        print(json.dumps(as_json(comparison), allow_nan=False))
    if arguments.html is not None:
        arguments.html.write_text(page(comparison), encoding="utf-8")
    return comparison
