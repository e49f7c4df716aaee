"""Time a script with torch's class and with tritonddp's, and compare their gradients.

The script is not edited. Both contenders (the script with each class) run at the same time on this
machine and take turns, so that both see the same noise. A short script is run as a whole, several
times. Files that the script saves with torch.save, safetensors or torch.distributed.checkpoint are
written to a folder in TMPDIR, one per launch, and loaded from there. No launch overwrites the files
of another launch or resumes from them. Other files, such as logs and files that the script opens
itself, are written to their usual paths. See docs/try.md for the method and the verdicts.
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
    several = "number of ranks, as for torchrun (default: %(default)s)"
    add("--nproc-per-node", "--nproc_per_node", type=ranks, default=RANKS, help=several)
    seconds = "start no launch more than S seconds after the first wrapping (default: %(default)s)"
    add("--seconds", type=whole(0), default=120, metavar="S", help=seconds)
    within = "stop when the ratio is known to within this many percent (default: %(default)s)"
    add("--within", type=whole(1), default=2, metavar="P", help=within)
    alone = "run one contender at a time, for two models that do not fit in memory (noisier)"
    add("--one-at-a-time", action="store_true", help=alone)
    files = "do not redirect the files that the script saves; later launches may load them"
    add("--keep-files", action="store_true", help=files)
    against = 'contender to compare with stock DDP; "stock" shows the noise (default: %(default)s)'
    add("--against", choices=(OURS, "stock"), default=OURS, help=against)
    add("--html", type=Path, metavar="FILE", help="write an HTML report with plots to this file")
    add("--json", action="store_true", help="print only one JSON object on stdout")
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("script", help="the training script, as for torchrun")
    add("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def main(arguments: argparse.Namespace) -> int:
    """Compare, and print the report. Return the exit code."""
    if not hasattr(os, "getloadavg"):
        print(
            f"tritonddp compare: error: requires Linux or macOS, not {sys.platform}",
            file=sys.stderr,
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
        f"comparing {arguments.script} with stock DDP and with {labels[1]}: gradients, and step "
        f"times in turns, {arguments.nproc_per_node} ranks each"
    )
    progress.say(
        f"about {LEAST_LAUNCHES} to 10 launches with both, until the ratio of step times is known "
        f"to {arguments.within} %, or for {arguments.seconds} s after the first model is wrapped. "
        "The first launch gives a first table. Ctrl-C stops and shows the results so far"
    )
    if not arguments.keep_files:
        progress.say(
            "files that the script saves with torch.save, safetensors or "
            "torch.distributed.checkpoint go to a scratch folder (disable with --keep-files); "
            "files that it opens itself are written to their usual paths"
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
                progress.say(f"starting launch {number}")
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
                rest = "" if stopped else f"; at most {more} more, of {now - began:.0f} s each"
                progress.say(f"launch {number}: {_ratios(launches)}{rest}")
                if stopped or number == 1:
                    comparison = _shown(launches, stopped, arguments)
                if stopped:
                    return comparison
        except KeyboardInterrupt:
            if launches.pairs:
                stopped = f"Interrupted. Completed launches: {len(launches.pairs)}."
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
            or "gradients only, no times yet"
        )
    ratio, last = Ratio.over(launches.times), Ratio.over(launches.times[-1:])
    return f"ratio {last.value:.3f}; over all launches {ratio}"


def _stopped(launches: Launches, fitting: int, arguments: argparse.Namespace) -> str:
    """Return why there are no more launches; empty if there are."""
    times, pair = launches.times, launches.pairs[-1]
    if pair.time is None and pair.outcomes is not None:
        return "Times were not compared."
    if pair.has_failed:
        return "The script fails with both contenders: correct it, then compare again."
    if not times:
        return ""
    ratio = Ratio.over(times)
    if len(times) >= LEAST_LAUNCHES and 100 * ratio.reach <= arguments.within:
        return f"Known to {arguments.within} % after {len(times)} launches."
    if fitting < 1 and len(times) != 2:  # Student's interval of two is meaningless
        longer = "increase --seconds"
        if not launches.in_turns:
            longer += ", or use a script with more steps"
        return (
            f"In {arguments.seconds} s, the ratio could not be determined to "
            f"{arguments.within} %: {longer}."
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
