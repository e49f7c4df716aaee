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
from pathlib import Path

from tritonddp.cli.comparison.page import page
from tritonddp.cli.comparison.report import Comparison, as_json, text
from tritonddp.cli.comparison.turns import LEAST_PAIRS, LEAST_WARMUP, Job, Launches, ScriptError
from tritonddp.cli.terminal import bar, whole

# A Unix socket's path has 107 bytes at most, of which 34 are for its folder here and its name.
_LONGEST = 73


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command, and those of the script."""
    add = parser.add_argument
    steps = "steps to time in a launch, of each contender (default: as many as are useful)"
    add("--steps", type=whole(LEAST_PAIRS), help=steps)
    warmup = "steps before that (default: %(default)s, of which tritonddp learns in 16)"
    add("--warmup", type=whole(LEAST_WARMUP), default=LEAST_WARMUP, help=warmup)
    launches = (
        "fresh pairs of processes: the interval is that of their means (default: %(default)s)"
    )
    add("--launches", type=whole(1), default=6, help=launches)
    ranks = "ranks, as torchrun takes it (default: %(default)s)"
    add("--nproc-per-node", "--nproc_per_node", default="2", help=ranks)
    add("--nnodes", default="1", help="only 1: both contenders run on this machine")
    alone = "whole launches in turn, where there is no memory for two models: noisier"
    add("--one-at-a-time", action="store_true", help=alone)
    against = "what runs beside stock; stock itself tells what is noise (default: %(default)s)"
    add("--against", choices=("tritonddp", "stock"), default="tritonddp", help=against)
    stall = "seconds without a report after which the script is given up (default: %(default)g)"
    add("--stall", type=float, default=600.0, help=stall)
    add("--html", type=Path, metavar="FILE", help="write a report with pictures, in one file")
    add("--json", action="store_true", help="print one JSON object, and nothing else")
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
    if arguments.json:
        print(json.dumps(as_json(comparison), allow_nan=False))
    else:
        print("\n".join(text(comparison)))
    if arguments.html is not None:
        arguments.html.write_text(page(comparison), encoding="utf-8")
    return 1 if comparison.has_findings else 0


def _obstacle(arguments: argparse.Namespace) -> str:
    """Why this cannot be carried out; empty if it can."""
    if arguments.nnodes not in ("1", "1:1"):
        return "--nnodes: it compares on one machine only"
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
    command = ["--nproc-per-node", arguments.nproc_per_node]
    command += ["-m"] * arguments.module + [arguments.script, *arguments.script_arguments]
    kind = arguments.against
    job = Job(
        command=command,
        labels=("stock", "tritonddp" if kind == "tritonddp" else "stock again"),
        kinds=("stock", kind),
        warmup=arguments.warmup,
        steps=arguments.steps,
        stall=arguments.stall,
    )
    began = time.monotonic()
    load, _, _ = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="tritonddp-compare-") as folder:
        with bar(arguments.launches, "launches", not arguments.json) as advance:
            launches = Launches(job, Path(folder), advance)
            in_turns = not arguments.one_at_a_time
            played = [launches.play(in_turns) for _ in range(arguments.launches)]
        plan = launches.plan
        assert plan is not None
        world_size = launches.world_size
        typed = shlex.join(["tritonddp", *sys.argv[1:]])
        took = time.monotonic() - began
        return Comparison(typed, job, plan, played, world_size, load, took)
