"""Run publicly reported failures with stock DDP and with tritonddp, and print the outcomes.

    python examples/failures/run.py [NAME ...] [--limit SECONDS] [--out FILE]

Every script in this folder reproduces one failure on two ranks, and does not use tritonddp. At the
end it prints a verdict that it has measured. It runs under torchrun, and unchanged under
`tritonddp run`. If it has comments `# tritonddp: LINE`, it also runs with these lines in place of
the lines below them; they are printed. The two or three runs are parallel.

Exit codes: 0; 1 if a failure remains with tritonddp; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch

import tritonddp
from tritonddp.cli.terminal import Progress

FOLDER = Path(__file__).resolve().parent
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__)}
STOCK = ("-m", "torch.distributed.run", "--standalone")
OURS = ("-m", "tritonddp", "run")
AS_IT_IS, WITH_LINES = "tritonddp", "tritonddp, with the lines"

MARKED = re.compile(r"^( *)# tritonddp: (.+)\n(.+)\n", re.MULTILINE)
VERDICT = re.compile(r"^verdict: (right|wrong|skipped): (.+)$", re.MULTILINE)
# An uncaught exception, as torch writes it to stderr: its first sentence, without the location in
# gloo's source.
ERROR = re.compile(
    r"^\[rank(\d+)\]: (?:\w+\.)*(\w+(?:Error|Exception|Interrupt)): (?:\[\S+\] )?(.+?)(?:\. .*)?$",
    re.MULTILINE,
)
# The first death in torchrun's report, of a rank that raised nothing, or not through torch.
DEATH = re.compile(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", re.DOTALL)
RAISED = re.compile(r"^(?:\w+\.)*((?!Child)\w+(?:Error|Exception): .+)$", re.MULTILINE)
MESSAGE = re.compile(r"^(rank \d+, step \d+.*)$", re.MULTILINE)  # from tritonddp
WRAPPED = "tritonddp run: tritonddp wrapped "
LONGEST = 150  # maximum number of characters of a message


@dataclass
class Outcome:
    """Result of one run: right, wrong, skipped, error or hung; the output; the duration."""

    word: str
    detail: str
    seconds: float


def with_lines(source: str) -> tuple[str, list[str]]:
    """Return the script with the lines in its comments applied, and these lines."""
    lines = [each[2] for each in MARKED.finditer(source)]
    return MARKED.sub(r"\1\2\n", source), lines


class Run:
    """A running script on two ranks. ``out`` and ``err`` receive its output."""

    def __init__(self, script: Path, launcher: Sequence[str], out: IO[str], err: IO[str]) -> None:
        self.launcher, self._out, self._err = launcher, out, err
        paths = [str(Path(tritonddp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._begin = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "--nproc-per-node", "2", str(script)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def outcome(self, limit: float) -> Outcome | None:
        """Return None while it runs. End it after ``limit`` seconds."""
        seconds = time.monotonic() - self._begin
        exit_code = self.process.poll()
        if exit_code is None:
            if seconds < limit:
                return None
            self.end()
            return Outcome("hung", f"ended after {limit:g} s", seconds)
        for file in (self._out, self._err):
            file.seek(0)
        stderr = self._err.read()
        word, detail = judge(self._out.read(), stderr, exit_code)
        if self.launcher == OURS and word in ("right", "wrong") and WRAPPED not in stderr:
            word = "error"
            detail = f"tritonddp has wrapped no model, so this says nothing: {detail}"
        return Outcome(word, detail, seconds)

    def end(self) -> None:
        """End the launcher and its ranks if they are still running."""
        if self.process.poll() is None:
            end(self.process)


def play(launches: Mapping[str, tuple[Path, Sequence[str]]], limit: float) -> dict[str, Outcome]:
    """Run scripts in parallel, for at most ``limit`` seconds. No process outlives the call."""
    runs: dict[str, Run] = {}
    found: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        for way, (script, launcher) in launches.items():
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            runs[way] = Run(script, launcher, *files)
            stack.callback(runs[way].end)
        progress = Progress()
        while len(found) < len(runs):
            time.sleep(0.05)
            progress.stage = f"still runs: {', '.join(way for way in runs if way not in found)}"
            progress.tick()
            for way in runs.keys() - found.keys():
                if outcome := runs[way].outcome(limit):
                    found[way] = outcome
    return {way: found[way] for way in launches}


def judge(stdout: str, stderr: str, exit_code: int) -> tuple[str, str]:
    """Judge a run by its output. Return a word and a text."""
    verdict = VERDICT.search(stdout)
    if verdict and exit_code == 0:
        message = MESSAGE.search(stderr)
        return verdict[1], verdict[2] + (f" (it said: {cut(message[1])})" if message else "")
    # The last error of each rank; earlier ones led to it.
    errors = {int(each[1]): f"{each[2]}: {each[3]}" for each in ERROR.finditer(stderr)}
    if errors:
        return "error", "; ".join(f"rank {rank}: {cut(errors[rank])}" for rank in sorted(errors))
    raised, death = RAISED.search(stderr), DEATH.search(stderr)
    who = f"rank {death[1]}: exit code {death[2]}" if death else f"exit code {exit_code}"
    last = raised[1] if raised else f"verdict '{verdict[2]}'" if verdict else "no verdict"
    return "error", f"{who}, {cut(last)}"


def cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and its ranks; first, let it end them itself."""
    below = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(3)  # ranks that hang or handle the signal do not end
    except subprocess.TimeoutExpired:
        for pid in (process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 5
        while any(Path("/proc", str(pid)).exists() for pid in below):
            if time.monotonic() > deadline:
                break  # killed, but not reaped
            time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Return all descendants of this process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def runs_of(script: Path, limit: float) -> tuple[dict[str, Outcome], list[str]]:
    """Return the outcomes by kind of run, and the lines for tritonddp."""
    source, lines = with_lines(script.read_text())
    launches = {"stock": (script, STOCK), AS_IT_IS: (script, OURS)}
    with tempfile.TemporaryDirectory(prefix="tritonddp-evidence-") as folder:
        if lines:
            copy = Path(folder) / script.name
            copy.write_text(source)
            launches[WITH_LINES] = (copy, OURS)
        return play(launches, limit), lines


def thread_of(script: Path) -> tuple[str, str]:
    """Return the title of a failure, and the public thread that reported it."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    thread = re.search(r"[\w.-]+/[\w.-]+#\d+", text)
    return text.partition("\n")[0], thread[0] if thread else "no thread"


def machine() -> str:
    return (
        f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, tritonddp {tritonddp.__version__}, "
        f"{time.strftime('%Y-%m-%d')}, load average {os.getloadavg()[0]:.1f} at the start"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a run (default: 180)")
    parser.add_argument("--out", type=Path, help="a file for all outcomes, in JSON")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in SCRIPTS:
            parser.error(f"there is no failure {name!r}: name some of {', '.join(SCRIPTS)}")
    if not options.limit > 0:
        parser.error(f"argument --limit: {options.limit:g} is not above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    where = machine()
    print(f"Two ranks over gloo, {where}")
    found: dict[str, dict[str, Outcome]] = {}
    for name in options.names or SCRIPTS:
        title, thread = thread_of(SCRIPTS[name])
        print(f"\n{name}, {thread}\n  {title}", flush=True)
        found[name], lines = runs_of(SCRIPTS[name], options.limit)
        for way, outcome in found[name].items():
            if way == WITH_LINES:
                print(*(f"    | {line}" for line in lines), sep="\n")
            text = f"{way}: {outcome.word}, {outcome.seconds:.1f} s: {outcome.detail}"
            print(
                textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    "), flush=True
            )
    print("\n" + "\n".join(summary(found)))
    if options.out:
        content = {
            name: {way: asdict(o) for way, o in each.items()} for name, each in found.items()
        }
        options.out.write_text(json.dumps({"machine": where, "failures": content}, indent=1))
    return 1 if missed(found) else 0


def missed(found: dict[str, dict[str, Outcome]]) -> list[str]:
    """Return the failures that remain in every run with tritonddp."""
    ours = {
        name: [o.word for way, o in each.items() if way != "stock"] for name, each in found.items()
    }
    return [name for name, words in ours.items() if not {"right", "skipped"} & set(words)]


def summary(found: dict[str, dict[str, Outcome]]) -> list[str]:
    """Return a table and its summary."""
    rows = [["", "stock", AS_IT_IS, "with the lines"]]
    for name, each in found.items():
        cells = (each.get(way) for way in ("stock", AS_IT_IS, WITH_LINES))
        rows.append([name, *(outcome.word if outcome else "" for outcome in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    words = [{way: o.word for way, o in each.items()} for each in found.values()]
    stock = sum(each["stock"] == "right" for each in words)
    as_it_is = sum(each[AS_IT_IS] == "right" for each in words)
    edited = sum(each[AS_IT_IS] != "right" == each.get(WITH_LINES) for each in words)
    lines += [
        "",
        f"Right with stock: {stock} of {len(found)}. With tritonddp: {as_it_is} as they are, and "
        f"{edited} more with the lines shown.",
    ]
    if names := missed(found):
        lines.append(f"Missed: {', '.join(names)}.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
