"""In the launcher: two contenders of one script that run in turns, block by block.

Both are started at the same time, by torchrun, and wait before their first model is wrapped. From
then on one of them runs while the other waits at the end of a step, so that both see the same
noise of the machine. Blocks are taken in the order A B, B A, A B, ...
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import Any

from tritonddp.cli.comparison.verdict import Launch
from tritonddp.cli.injection import COMPARE, environment
from tritonddp.cli.terminal import Progress

OURS = "tritonddp"
# Steps before any is timed: tritonddp learns the order of gradients and more in the first 16. Of
# long steps there are as many as fit into half of so many seconds, and of all so many at least.
WARMUP, LEAST_WARMUP, _SECONDS = 20, 5, 10.0
_FIRST = 1  # of these is not counted when they tell how long a step takes
# A block lasts about so long, that there are enough of them, and has so many steps at most.
_BLOCK_SECONDS, _BLOCK_STEPS = 0.1, 100
_LONG_STEP = 0.5  # seconds; what caches held before makes no difference to it
_PAIRS, _LEAST_PAIRS = 32, 6  # of blocks in a launch, fewer if steps are long
_LONGEST_HELLO = 1000  # bytes in which a rank says who it is
_LINES = 25  # of a log, when a script has failed
# What a script says that cannot run twice at the same time.
_NEEDS_A_TURN = ("out of memory", "address already in use")
_TORCHRUNS = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
# Seconds for torchrun to end with its script. It gives ranks that do not end when asked to 30.
_ENDING = 40.0


class ScriptError(Exception):
    """The script failed, or cannot be compared; says why and what to do."""


class ScriptEnded(Exception):
    """A script has ended as it wanted, before its order was done."""


@dataclass(frozen=True)
class Plan:
    """The steps of a launch; the same in all of them."""

    warmup: int  # before any is timed, behind the first ones; and behind the blocks to note parts
    block: int  # steps of a block that are counted
    skipped: int  # steps before them, which find caches full of the other's data
    pairs: int  # of blocks

    @classmethod
    def of(cls, seconds: float) -> Plan:
        """For steps that take so many seconds."""
        fitting = int(_SECONDS / seconds)
        block = max(1, min(_BLOCK_STEPS, round(_BLOCK_SECONDS / seconds)))
        skipped = 0 if seconds > _LONG_STEP else 1
        return cls(
            warmup=max(LEAST_WARMUP, min(WARMUP, fitting // 2) - LEAST_WARMUP),
            block=block,
            skipped=skipped,
            pairs=max(_LEAST_PAIRS, min(_PAIRS, fitting // (2 * (block + skipped)))),
        )

    @property
    def least(self) -> int:
        """Steps that a script must make."""
        return LEAST_WARMUP + self.warmup + _LEAST_PAIRS * (self.block + self.skipped)


@dataclass
class Played:
    """What a contender has shown in one launch; what is empty it has not."""

    blocks: list[float] = field(default_factory=list)  # seconds per step, of the slowest rank
    shares: dict[str, float] = field(default_factory=dict)  # of a step: means, by part
    backwards: float = 0.0  # in a step of rank 0
    peak_bytes: int = 0  # of the largest rank
    # What ranks had at the first steps and later, by title and rank.
    captures: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)


class Contender:
    """The processes of one contender in one launch."""

    def __init__(
        self, command: Sequence[str], label: str, port: int, folder: Path, progress: Progress
    ) -> None:
        self.label = label
        self.token = f"{label}-{secrets.token_hex(16)}"  # in the variables of its processes
        self.ranks: dict[int, Connection] = {}
        self.world_size = 0
        self.played = Played()
        self._progress = progress
        values = folder / self.token
        values.mkdir()
        self._log = values / "log"
        session = {"is_ours": label == OURS, "values": str(values)}
        variables = environment(COMPARE, port=port, contender=self.token, **session)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*torchrun, *command],
                env={"PYTHONHASHSEED": "0", **os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(
        self, count: int, skipped: int = 0, *, parts: bool = False, captures: bool = False
    ) -> list[dict[str, Any]]:
        """Let all ranks make steps, and return what each reports, by rank.

        Args:
            count: number of steps.
            skipped: number of the first steps, which are not timed.
            parts: note the parts of each step.
            captures: take the parameters at the end.

        Raises:
            ScriptEnded: a rank is gone, or the whole script.
            ScriptError: it failed, or cannot be compared.
        """
        order = {"count": count, "timed": count - skipped, "parts": parts, "captures": captures}
        for to in self.ranks.values():
            with suppress(OSError):  # a rank is gone: found when its report is read
                to.send_bytes(json.dumps(order).encode())
        reports: dict[int, dict[str, Any]] = {}
        waiting = {connection: rank for rank, connection in self.ranks.items()}
        while waiting:
            self._progress.tick()
            ready = wait(list(waiting), 1.0)
            if not ready and self.process.poll() is not None:
                raise self._end()
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    report = json.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    raise self._end() from None
                if "error" in report:
                    raise ScriptError(report["error"])
                rank = waiting.pop(connection)
                reports[rank] = report
                for title, captured in report["captured"].items():
                    self.played.captures.setdefault(title, {})[rank] = captured
        return [reports[rank] for rank in sorted(reports)]

    def seconds(self, count: int, skipped: int = 0) -> float:
        """Let all ranks make so many steps; returns what one took, see :meth:`run`."""
        took = max(report["took"] for report in self.run(count, skipped))
        return max(took, 1e-6) / (count - skipped)

    def _end(self) -> Exception:
        """How its script ended: torchrun knows when the other ranks have ended, too."""
        end = time.monotonic() + _ENDING
        while self.process.poll() is None and time.monotonic() < end:
            self._progress.tick()
            time.sleep(0.05)
        code = self.process.returncode
        return self.error(f"failed with exit code {code}.") if code else ScriptEnded()

    def error(self, what: str) -> ScriptError:
        """An error of its script, with the last lines that it has printed."""
        printed = self._log.read_text(errors="replace")
        if any(words in printed.lower() for words in _NEEDS_A_TURN):
            what += " Both contenders run at once: with --one-at-a-time they do not."
        # torchrun's own report of a failure says less than the script's, and is longer.
        before, found, _ = printed.partition(_TORCHRUNS)
        if found:
            before = before.rpartition("Traceback (most recent call last):")[0]
        lines = [each for each in before.splitlines() if "torch/distributed/elastic" not in each]
        last = "\n".join(lines[-_LINES:])
        return ScriptError(f"{self.label}'s script {what}\nThe last lines of {self.label}:\n{last}")

    def kill(self) -> None:
        """Kill its processes and all that they have started."""
        token = self.token.encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if token in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        self.process.kill()
        self.process.wait()


class Launches:
    """Launches of both contenders, one after the other.

    Whichever of ``labels`` is not :data:`OURS` has torch's class.
    """

    def __init__(
        self, command: Sequence[str], labels: Sequence[str], folder: Path, progress: Progress
    ) -> None:
        self.played: list[list[Played]] = []  # by both contenders, in each launch
        self.times: list[Launch] = []  # of a step, in each launch
        self.plan: Plan | None = None
        self.world_size = 0
        self.started = 0.0  # when the ranks of the first launch waited before their first model
        self.load, _, _ = os.getloadavg()  # of the machine, before the first launch
        self.labels, self.progress = labels, progress
        self._command, self._folder = command, folder

    def play(self, in_turns: bool) -> None:
        """Run both contenders of one launch, in turns or one after the other.

        Raises:
            ScriptError: it failed or is too short.
        """
        order = self.labels[:: 1 if len(self.played) % 2 == 0 else -1]
        played: dict[str, Played] = {}
        for labels in [order] if in_turns else [[label] for label in order]:
            played |= self._play(labels)
        self.played.append([played[label] for label in self.labels])
        self.times.append(Launch.of(*(each.blocks for each in self.played[-1])))

    def _play(self, labels: Sequence[str]) -> dict[str, Played]:
        """Play the contenders with these labels, the first one first."""
        contenders: list[Contender] = []
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            to = (listener.getsockname()[1], self._folder, self.progress)
            for label in labels:
                contenders.append(Contender(self._command, label, *to))
                stack.callback(contenders[-1].kill)
            self._gather(listener, contenders)
            self.world_size = contenders[0].world_size
            self.started = self.started or time.monotonic()
            with suppress(ScriptEnded):
                self._warm_up(contenders)
                self._blocks(contenders)
                for each in contenders:
                    self._probe(each)
        if min(len(each.played.blocks) for each in contenders) < _LEAST_PAIRS:
            least = WARMUP if self.plan is None else self.plan.least
            raise ScriptError(
                f"the script is too short: it ended before step {least} of its optimizer, and at "
                "least so many are needed. Let it make more."
            )
        return {each.label: each.played for each in contenders}

    def _gather(self, listener: socket.socket, contenders: Sequence[Contender]) -> None:
        """Wait until all ranks wait before their first model."""
        by_token = {each.token: each for each in contenders}
        silent: list[Connection] = []  # connections of which it is not known whose they are
        while not all(0 < each.world_size == len(each.ranks) for each in contenders):
            there = sum(len(each.ranks) for each in contenders)
            self.progress.stage = f"the script starts; {there} ranks have come to its model"
            self.progress.tick()
            for each in contenders:
                if (code := each.process.poll()) is not None:
                    what = "before it wrapped a model with torch's DistributedDataParallel"
                    raise each.error(f"ended with exit code {code} {what}.")
            for ready in wait([listener, *silent], 0.5):
                if not isinstance(ready, Connection):  # the listener
                    accepted, _ = listener.accept()
                    accepted.setblocking(False)
                    silent.append(Connection(accepted.detach()))
                    continue
                silent.remove(ready)
                with suppress(OSError, EOFError, ValueError):  # somebody else
                    hello = json.loads(ready.recv_bytes(_LONGEST_HELLO))
                    if contender := by_token.get(hello.get("contender")):
                        os.set_blocking(ready.fileno(), True)
                        contender.ranks[hello["rank"]] = ready
                        contender.world_size = hello["world_size"]

    def _warm_up(self, contenders: Sequence[Contender]) -> None:
        """Warm up; the first time the length of a step decides what a launch is."""
        self.progress.stage = "both warm up"
        seconds = [each.seconds(LEAST_WARMUP, _FIRST) for each in contenders]
        plan = self.plan or Plan.of(min(seconds))
        seconds += [each.seconds(plan.warmup) for each in contenders]
        if self.plan is None:  # the first steps of all may take far longer than others
            self.plan = replace(Plan.of(min(seconds)), warmup=plan.warmup)
            self.progress.say(f"a step takes about {1e3 * min(seconds):.3g} ms")

    def _blocks(self, contenders: Sequence[Contender]) -> None:
        """Time blocks of steps in turns."""
        order, plan = list(contenders), self.plan
        assert plan is not None
        steps = plan.skipped + plan.block
        for number in range(plan.pairs):
            self.progress.stage = f"{number} of {plan.pairs} pairs of blocks"
            is_last = number == plan.pairs - 1
            pair = [each.run(steps, plan.skipped, captures=is_last) for each in order]
            for each, reports in zip(order, pair, strict=True):
                each.played.blocks.append(max(report["took"] for report in reports) / plan.block)
                each.played.backwards = reports[0]["backwards"] / steps
                each.played.peak_bytes = max(report["peak"] for report in reports)
            order.reverse()

    def _probe(self, contender: Contender) -> None:
        """Note the parts of some steps; what they take does not count as the time of a step."""
        assert self.plan is not None
        self.progress.stage = f"the parts of {contender.label}'s steps"
        # At the end of a step the parts of the one before are known, see the recorder.
        reports = contender.run(self.plan.warmup + 2, 2, parts=True)
        if all(report["parts"] for report in reports):
            seconds = max(report["took"] for report in reports)
            shares = {
                name: fmean(report["parts"][name] for report in reports) / seconds
                for name in reports[0]["parts"]
            }
            contender.played.shares = {**shares, "rest": max(0.0, 1 - sum(shares.values()))}
