"""Time a script with torch's class and with tritonddp's, and compare their gradients.

The script is not edited. Both contenders run at the same time on this machine and take turns, so
that both see the same noise: docs/try.md says how, and what the verdict means.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tritonddp.cli.comparison.page import page
from tritonddp.cli.comparison.report import Comparison, as_json, text
from tritonddp.cli.comparison.turns import LEAST_PAIRS, LEAST_WARMUP, Job, Launches, ScriptError

# A Unix socket's path has 107 bytes at most, of which 34 are for its folder here and its name.
_LONGEST = 73


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the comparison, and what torchrun is to start."""
    add = parser.add_argument
    add(
        "--steps",
        type=_at_least(LEAST_PAIRS),
        help="steps to time in a launch, of each contender (default: as many as are useful)",
    )
    add(
        "--warmup",
        type=_at_least(LEAST_WARMUP),
        default=LEAST_WARMUP,
        help="steps before that (default: %(default)s, of which tritonddp learns in 16)",
    )
    add(
        "--launches",
        type=_at_least(1),
        default=6,
        help="fresh pairs of processes: the interval is that of their means (default: %(default)s)",
    )
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        default="2",
        help="ranks, as torchrun takes it (default: %(default)s)",
    )
    add("--nnodes", default="1", help="only 1: both contenders run on this machine")
    add(
        "--one-at-a-time",
        action="store_true",
        help="whole launches in turn, where there is no memory for two models: noisier",
    )
    add(
        "--against",
        choices=("tritonddp", "stock"),
        default="tritonddp",
        help="what runs beside stock; stock itself tells what is noise (default: %(default)s)",
    )
    add(
        "--stall",
        type=float,
        default=600.0,
        help="seconds without a report after which the script is given up (default: %(default)g)",
    )
    add("--html", type=Path, metavar="FILE", help="write a report with pictures, in one file")
    add("--json", action="store_true", help="print one JSON object, and nothing else")
    add("-m", "--module", action="store_true", help="the script is the name of a module")
    add("script", help="the training script, as torchrun takes it")
    add("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def main(arguments: argparse.Namespace) -> int:
    """Compare, and print what came of it; returns the exit code."""
    if arguments.nnodes not in ("1", "1:1"):
        print(
            "tritonddp compare: error: --nnodes: it compares on one machine only", file=sys.stderr
        )
        return 2
    if not arguments.module and not Path(arguments.script).is_file():
        print(f"tritonddp compare: error: there is no file {arguments.script}", file=sys.stderr)
        return 2
    if arguments.html is not None and not arguments.html.parent.is_dir():
        print(
            f"tritonddp compare: error: there is no folder {arguments.html.parent}", file=sys.stderr
        )
        return 2
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST:
        print(
            "tritonddp compare: error: the name of the folder for temporary files is too long for "
            f"a Unix socket in it: set TMPDIR to one of {_LONGEST} characters or fewer",
            file=sys.stderr,
        )
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
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with tempfile.TemporaryDirectory(prefix="tritonddp-compare-") as folder:
        with _progress(arguments.launches, not arguments.json) as told:
            launches = Launches(job, Path(folder), told)
            play = launches.one_at_a_time if arguments.one_at_a_time else launches.pair
            played = [play() for _ in range(arguments.launches)]
        plan = launches.plan
        assert plan is not None
        world_size = launches.world_size
        typed = shlex.join(["tritonddp", *sys.argv[1:]])
        took = time.monotonic() - began
        return Comparison(typed, job, plan, played, world_size, load, took)


@contextmanager
def _progress(launches: int, is_wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """What is called with the pairs done and all pairs of a launch: a bar, in a terminal only."""
    if not is_wanted or not sys.stderr.isatty():
        yield lambda done, pairs: None
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        print(f"{launches} launches (pip install tqdm shows how far they are)", file=sys.stderr)
        yield lambda done, pairs: None
        return
    with tqdm(total=launches, unit="launch", leave=False) as bar:

        def told(done: int, pairs: int) -> None:
            bar.update(1 / pairs)

        yield told


def _at_least(least: int) -> Callable[[str], int]:
    def number(word: str) -> int:
        value = int(word)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
        return value

    return number
