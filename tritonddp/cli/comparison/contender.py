"""In the launcher: the processes of one contender in one launch, and the reports of its ranks.

The launcher sends orders, and the recorder in each rank answers (see ``recorder.py``); both send
JSON.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import Any

from tritonddp.cli.injection import COMPARE, environment
from tritonddp.cli.terminal import Progress

OURS = "tritonddp"
ENDED, STOPPED, FAILED, SILENT = "ended", "was stopped", "failed", "hangs"
_LINES, _WIDTH = 20, 80  # of a log: lines shown after a failure, characters of the last one
# Output of torchrun.
_NOISE = ("torch/distributed/elastic", "*****", "Setting OMP_NUM_THREADS")
_TORCHRUNS = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
_RAISED = re.compile(r"(\[rank\d+\]: )+[\w.]+(Error|Exception): ")
# Seconds for torchrun to end after its script. It waits 30 s for ranks that do not exit.
_ENDING = 40.0
_SECONDS_FOR_STACK = 0.3  # for each rank; otherwise the lines of two would mix


class ScriptError(Exception):
    """The script failed, or cannot be compared; the message has the reason and the remedy."""


class RankEnded(Exception):
    """A rank ended before its order was done."""


@dataclass(frozen=True)
class Outcome:
    """How one launch of one contender ended."""

    how: str  # ENDED with exit code 0, STOPPED by the launcher, FAILED or SILENT
    steps: int  # completed by all ranks
    longest: float  # seconds between two reports
    last: str = ""  # the last lines that the script printed, if it failed or is silent

    @property
    def is_right(self) -> bool:
        """Whether nothing went wrong."""
        return self.how in (ENDED, STOPPED)


@dataclass
class Played:
    """Results of a contender in one launch; unknown values are empty."""

    blocks: list[float] = field(default_factory=list)  # seconds per step, of the slowest rank
    steps: dict[int, list[float]] = field(default_factory=dict)  # seconds of each step, by rank
    shares: dict[str, float] = field(default_factory=dict)  # shares of a step: means, by part
    backwards: float = 0.0  # per step of rank 0
    peak_bytes: int = 0  # of the rank with the most
    # Captures of the ranks at the first steps and later, by title and rank.
    captures: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    outcome: Outcome | None = None  # of a launch without the other contender


class Contender:
    """The processes of one contender in one launch.

    Args:
        command: arguments of Python that start the script.
        session: for the recorder in its ranks; see ``recorder.py``.
        keeps_files: do not redirect saved files to a folder of the launch.
    """

    def __init__(
        self,
        command: Sequence[str],
        label: str,
        folder: Path,
        progress: Progress,
        session: Mapping[str, Any],
        *,
        keeps_files: bool,
    ) -> None:
        self.label = label
        self.token = f"{label}-{secrets.token_hex(16)}"  # in the environment of its processes
        self.ranks: dict[int, Connection] = {}
        self.pids: list[int] = []  # of the ranks
        self.world_size = 0
        self.played = Played()
        self.reports: dict[int, dict[str, Any]] = {}  # on the last order, by rank
        self.longest = 0.0  # seconds between two reports
        self.done = 0  # steps of completed orders
        self._count = 0  # number of steps in the last order
        self._waiting: dict[Connection, int] = {}  # ranks that have not completed the last order
        self._unstepped: dict[int, list[float]] = {}  # seconds of backwards that may be steps
        self._has_lost = False  # whether a rank is gone
        self._progress = progress
        values = folder / self.token
        values.mkdir()
        self._log, self._saved, self._folders = values / "log", values / "saved", folder / "folders"
        session = {**session, "is_ours": label == OURS, "values": str(values)}
        session["folders"] = str(self._folders)
        session["saved"] = "" if keeps_files else str(self._saved)
        variables = environment(COMPARE, contender=self.token, **session)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={"PYTHONHASHSEED": "0", **os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # Orders

    def give(
        self, count: int, skipped: int = 0, *, parts: bool = False, each: bool = False
    ) -> None:
        """Let all ranks run steps.

        Args:
            count: number of steps.
            skipped: number of steps at the beginning that are not timed.
            parts: record the parts of each step.
            each: report the time of each step.
        """
        order = {"count": count, "timed": count - skipped, "parts": parts, "each": each}
        for to in self.ranks.values():
            with suppress(OSError):  # the rank is gone; found when its report is read
                to.send_bytes(json.dumps(order).encode())
        self.reports, self._count = {}, count
        self._waiting = {connection: rank for rank, connection in self.ranks.items()}

    def finish(self, patience: float) -> bool:
        """Wait until all ranks complete the order. Return False after ``patience`` silent seconds.

        Raises:
            RankEnded: a rank is gone, and the others are gone too or have completed the order.
            ScriptError: the script cannot be compared.
        """
        heard = time.monotonic()
        while self._waiting:
            self._progress.tick()
            ready = wait(list(self._waiting), 1.0)
            silent = time.monotonic() - heard
            for connection in ready:
                assert isinstance(connection, Connection)
                self._read(connection)
                heard = time.monotonic()
            if ready:
                self.longest = max(self.longest, silent)
            elif self.process.poll() is not None:
                raise RankEnded
            elif silent > patience:
                return False
        if self._has_lost:
            raise RankEnded
        self.done += self._count
        return True

    def _read(self, connection: Connection) -> None:
        """Receive one message of a rank."""
        rank = self._waiting[connection]
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            del self._waiting[connection]
            self._has_lost = True
            return
        if "error" in message:
            raise ScriptError(message["error"])
        if "captured" in message:
            self.played.captures.setdefault(message["title"], {})[rank] = message["captured"]
            return
        if "step" in message:
            self.played.steps.setdefault(rank, []).append(message["step"])
        elif "unstepped" in message:
            self._unstepped.setdefault(rank, []).append(message["unstepped"])
        else:
            del self._waiting[connection]
            self.reports[rank] = message
        if rank == 0 and "backwards" in message:
            self.played.backwards = message["backwards"]
        self.played.peak_bytes = max(self.played.peak_bytes, message.get("peak", 0))

    @property
    def steps(self) -> int:
        """Number of steps that all ranks have reported individually."""
        return min((len(self.played.steps.get(rank, ())) for rank in self.ranks), default=0)

    def note_parts(self) -> None:
        """Record the shares of a step that its parts take, from the reports on the last order."""
        reports = self.reports.values()
        if all(report["parts"] for report in reports):
            seconds = max(report["took"] for report in reports)
            names = next(iter(reports))["parts"]
            shares = {
                name: fmean(report["parts"][name] for report in reports) / seconds for name in names
            }
            self.played.shares = {**shares, "rest": max(0.0, 1 - sum(shares.values()))}

    # The end

    def end(self) -> Outcome:
        """Return how the script ended, after torchrun has waited for the other ranks."""
        end = time.monotonic() + _ENDING
        while self.process.poll() is None and time.monotonic() < end:
            self._progress.tick()
            time.sleep(0.05)
        code = self.process.returncode
        return self.outcome(SILENT if code is None else FAILED if code else ENDED)

    def outcome(self, how: str) -> Outcome:
        """Return the results so far, with ``how`` as the end."""
        if not self.played.steps:  # no optimizer steps
            self.played.steps = self._unstepped
        if how == SILENT:
            self._write_stacks()
        last = "" if how in (ENDED, STOPPED) else self.last_lines()
        return Outcome(how, self.steps, self.longest, last)

    def _write_stacks(self) -> None:
        """Let the ranks write their stacks to the log; see ``recorder.py``."""
        for pid in self.pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
            time.sleep(_SECONDS_FOR_STACK)

    def last_lines(self) -> str:
        """Return the errors of ranks and the last lines that the script printed.

        The first rank that fails has often printed its traceback before the others.
        """
        printed = self._log.read_text(errors="replace")
        # torchrun's own report of a failure says less than the script's report, and is longer.
        before, found, _ = printed.partition(_TORCHRUNS)
        if found:
            before = before.rpartition("Traceback (most recent call last):")[0]
        lines = [each for each in before.splitlines() if not any(map(each.__contains__, _NOISE))]
        errors = filter(_RAISED.match, lines[:-_LINES])
        return "\n".join([*errors, *lines[-_LINES:]])

    def last_line(self) -> str:
        """Return the last line, as the end of a sentence."""
        *_, last = ["", *filter(str.strip, self.last_lines().splitlines())]
        return f"; its last line: {last.strip()[-_WIDTH:]}" * bool(last)

    def kill(self) -> None:
        """Kill the processes, and on Linux everything that they have started."""
        token = self.token.encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if token in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for to in self.ranks.values():
            to.close()
        shutil.rmtree(self._saved, ignore_errors=True)
        with suppress(OSError):  # there is no such file if the script made no folders
            for made in reversed(self._folders.read_text().splitlines()):
                with suppress(OSError):  # not empty
                    os.rmdir(made)
