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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import Any

from tritonddp.cli.injection import COMPARE, environment
from tritonddp.cli.terminal import Progress

# Steps before any is timed: tritonddp learns the order of gradients and more in the first 16. Of
# long steps there are as many as fit into so many seconds, and of all so many at least.
WARMUP, LEAST_WARMUP, _SECONDS = 20, 5, 10.0
_FIRST = 1  # of these is not counted when they tell how long a step takes
# A block lasts about so long, that there are enough of them, and has so many steps at most.
_BLOCK_SECONDS, _BLOCK_STEPS = 0.1, 100
_LONG_STEP = 0.5  # seconds; what caches held before makes no difference to it
_PAIRS, _LEAST_PAIRS = 32, 6  # of blocks in a launch, fewer if steps are long
_PARTS, _LEAST_PARTS = 12, 4  # steps whose parts are noted
_LINES = 25  # of a log, when a script has failed
# What a script says that cannot run twice at the same time, and why.
_NEEDS_A_TURN = {
    "out of memory": "a script that leaves no memory for a second model",
    "address already in use": "a script with a fixed port",
}
_TORCHRUNS = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
# Seconds for torchrun to end with its script. It gives ranks that do not end when asked to 30.
_ENDING = 40.0


class ScriptError(Exception):
    """The script failed, or cannot be compared; says why and what to do."""


class ScriptEnded(Exception):
    """The script of a contender is over before its order is."""

    def __init__(self, contender: Contender, code: int) -> None:
        super().__init__(contender, code)
        self.contender, self.code = contender, code


@dataclass(frozen=True)
class Job:
    """What is compared.

    Attributes:
        command: behind ``torchrun --standalone``.
        against: which class wraps in the second contender, "stock" or "tritonddp".
    """

    command: Sequence[str]
    against: str

    @property
    def labels(self) -> tuple[str, str]:
        """The names of the contenders."""
        return "stock", "stock again" if self.against == "stock" else self.against


@dataclass(frozen=True)
class Plan:
    """The steps of a launch; the same in all of them.

    Attributes:
        warmup: before any is timed.
        block: steps of a block that are counted, behind
        skipped: one that finds caches full of the other's data.
        pairs: of blocks.
        parts: steps whose parts are noted.
    """

    warmup: int
    block: int
    skipped: int
    pairs: int
    parts: int

    @classmethod
    def of(cls, seconds: float) -> Plan:
        """For steps that take so many seconds."""
        fitting = int(_SECONDS / seconds)
        block = max(1, min(_BLOCK_STEPS, round(_BLOCK_SECONDS / seconds)))
        skipped = 0 if seconds > _LONG_STEP else 1
        return cls(
            warmup=max(LEAST_WARMUP, min(WARMUP, fitting)),
            block=block,
            skipped=skipped,
            pairs=max(_LEAST_PAIRS, min(_PAIRS, fitting // (2 * (block + skipped)))),
            parts=max(_LEAST_PARTS, min(_PARTS, fitting)),
        )

    @property
    def least(self) -> int:
        """Steps that a script must make."""
        return self.warmup + _LEAST_PAIRS * (self.block + self.skipped)


@dataclass
class Played:
    """What a contender has shown in one launch; what is empty it has not.

    Attributes:
        blocks: seconds per step, of each block the slowest rank's.
        shares: of a step, by the names of its parts; means over steps and ranks.
        backwards: in a step of rank 0.
        peak_bytes: of the largest rank.
        captures: what ranks had at the first steps and later, by title and rank.
        steps: how many it made.
    """

    blocks: list[float] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    backwards: float = 0.0
    peak_bytes: int = 0
    captures: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    steps: int = 0


class Contender:
    """The processes of one contender in one launch."""

    def __init__(
        self, job: Job, index: int, launch: str, address: Path, folder: Path, progress: Progress
    ) -> None:
        self.label = job.labels[index]
        self.name = f"{launch}-{index}"
        self.ranks: dict[int, Connection] = {}
        self.world_size = 0
        self.played = Played()
        self._progress = progress
        self._token = secrets.token_hex(16)
        self._log = folder / f"{self.name}.log"
        values = folder / f"{self.name}.values"
        values.mkdir()
        variables = environment(
            COMPARE,
            socket=str(address),
            contender=self.name,
            kind=("stock", job.against)[index],
            seed=0,
            values=str(values),
            token=self._token,
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*torchrun, *job.command],
                env={"PYTHONHASHSEED": "0", **os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_there(self) -> bool:
        """All ranks wait before their first model."""
        return self.world_size > 0 and len(self.ranks) == self.world_size

    def run(
        self, count: int, skipped: int = 0, *, parts: bool = False, captures: bool = False
    ) -> list[dict[str, Any]]:
        """Let all ranks make so many steps, and return what each reports, by rank.

        Args:
            count: of steps, of which so many are
            skipped: the first ones; they are not timed.
            parts: note the parts of each step.
            captures: take the parameters at the end.

        Raises:
            ScriptEnded: a rank is gone, or the whole script.
            ScriptError: it cannot be compared.
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
                raise ScriptEnded(self, self.process.returncode)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank, message = waiting[connection], self._receive(connection)
                if "error" in message:
                    raise ScriptError(message["error"])
                self.played.steps = max(self.played.steps, message.get("step", 0))
                if "captured" in message:
                    self.played.captures.setdefault(message["captured"], {})[rank] = message
                elif "has_ended" not in message:
                    reports[rank] = message
                    del waiting[connection]
        return [reports[rank] for rank in sorted(reports)]

    def _receive(self, connection: Connection) -> dict[str, Any]:
        try:
            return json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            # The end of the script. The others may still be at it: torchrun knows how it ended.
            end = time.monotonic() + _ENDING
            while self.process.poll() is None and time.monotonic() < end:
                self._progress.tick()
                time.sleep(0.05)
            raise ScriptEnded(self, self.process.returncode or 0) from None

    def error(self, what: str) -> ScriptError:
        """An error of its script, with the last lines that it has printed."""
        printed = self._log.read_text(errors="replace")
        for message, reason in _NEEDS_A_TURN.items():
            if message in printed.lower():
                what += f" Both contenders run at once: {reason} needs --one-at-a-time."
        # torchrun's own report of a failure says less than the script's, and is longer.
        before, found, _ = printed.partition(_TORCHRUNS)
        if found:
            before = before.rpartition("Traceback (most recent call last):")[0]
        lines = [each for each in before.splitlines() if "torch/distributed/elastic" not in each]
        last = "\n".join(lines[-_LINES:])
        return ScriptError(f"{self.label}'s script {what}\nThe last lines of {self.label}:\n{last}")

    def kill(self) -> None:
        """Kill its processes and all that they have started: their variables have the token."""
        token = self._token.encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if token in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for connection in self.ranks.values():
            connection.close()


class Launches:
    """Launches of a job, one after the other.

    Args:
        folder: for logs and values.
        progress: is told what goes on.
    """

    def __init__(self, job: Job, folder: Path, progress: Progress) -> None:
        self.plan: Plan | None = None
        self.world_size = 0
        self.started = 0.0  # when the ranks of the first launch waited before their first model
        self._job, self._folder, self._progress = job, folder, progress
        self._count = 0

    def play(self, in_turns: bool) -> list[Played]:
        """Run both contenders of one launch, in turns or one after the other.

        Raises:
            ScriptError: it failed or is too short.
        """
        order = [0, 1] if self._count % 2 == 0 else [1, 0]
        self._count += 1
        played: dict[int, Played] = {}
        for indices in [order] if in_turns else [[index] for index in order]:
            played |= self._play(indices)
        return [played[0], played[1]]

    def _play(self, indices: Sequence[int]) -> dict[int, Played]:
        """Play the contenders of these indices, the first one first."""
        with self._started(indices) as contenders:
            self.world_size = contenders[0].world_size
            self.started = self.started or time.monotonic()
            try:
                self._warm_up(contenders)
                self._blocks(contenders)
                for each in contenders:
                    self._probe(each)
            except ScriptEnded as end:
                if end.code:
                    raise end.contender.error(f"failed with exit code {end.code}.") from None
            played = {index: each.played for index, each in zip(indices, contenders, strict=True)}
        if min(len(each.blocks) for each in played.values()) < _LEAST_PAIRS:
            least = WARMUP if self.plan is None else self.plan.least
            raise ScriptError(
                f"the script is too short: it made {max(each.steps for each in played.values())} "
                f"steps of its optimizer, and at least {least} are needed. Let it make more."
            )
        return played

    @contextmanager
    def _started(self, indices: Sequence[int]) -> Iterator[list[Contender]]:
        """Context: contenders that wait before their first model is wrapped; ended afterwards."""
        address = self._folder / "socket"
        contenders: list[Contender] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(1024)
            listener.settimeout(0.5)
            try:
                for index in indices:
                    of = (f"launch{self._count}", address, self._folder, self._progress)
                    contenders.append(Contender(self._job, index, *of))
                self._gather(listener, contenders)
                yield contenders
            finally:
                for each in contenders:
                    each.kill()
                address.unlink()

    def _gather(self, listener: socket.socket, contenders: Sequence[Contender]) -> None:
        by_name = {each.name: each for each in contenders}
        while not all(each.is_there for each in contenders):
            there = sum(len(each.ranks) for each in contenders)
            self._progress.stage = f"the script starts; {there} ranks have come to its model"
            self._progress.tick()
            for each in contenders:
                code = each.process.poll()
                if code:
                    raise each.error(f"failed with exit code {code} before it wrapped a model.")
                if code == 0:
                    raise each.error("wrapped no model with torch's DistributedDataParallel.")
            with suppress(TimeoutError, EOFError):
                accepted, _ = listener.accept()
                accepted.settimeout(None)
                connection = Connection(accepted.detach())
                hello = json.loads(connection.recv_bytes())
                if contender := by_name.get(hello.get("contender")):
                    contender.ranks[hello["rank"]] = connection
                    contender.world_size = hello["world_size"]

    def _warm_up(self, contenders: Sequence[Contender]) -> None:
        """Warm up; the first time the length of a step decides what a launch is."""
        for each in contenders:
            self._progress.stage = f"{each.label} warms up"
            reports = each.run(LEAST_WARMUP, _FIRST)
            if self.plan is None:
                longest = max(report["took"] for report in reports)
                seconds = max(longest / (LEAST_WARMUP - _FIRST), 1e-6)
                self.plan = Plan.of(seconds)
                self._progress.say(f"a step of {each.label} takes about {1e3 * seconds:.0f} ms")
            if self.plan.warmup > LEAST_WARMUP:
                each.run(self.plan.warmup - LEAST_WARMUP)

    def _blocks(self, contenders: Sequence[Contender]) -> None:
        order, plan = list(contenders), self.plan
        assert plan is not None
        steps = plan.skipped + plan.block
        for number in range(plan.pairs):
            self._progress.stage = f"{number} of {plan.pairs} pairs of blocks"
            is_last = number == plan.pairs - 1
            pair = [each.run(steps, plan.skipped, captures=is_last) for each in order]
            for each, reports in zip(order, pair, strict=True):
                each.played.blocks.append(max(report["took"] for report in reports) / plan.block)
                each.played.backwards = reports[0]["backwards"] / steps
                each.played.peak_bytes = max(report["peak"] for report in reports)
            order.reverse()

    def _probe(self, contender: Contender) -> None:
        """Note the parts of some steps, which are not timed."""
        assert self.plan is not None
        self._progress.stage = f"the parts of {contender.label}'s steps"
        reports = contender.run(self.plan.parts, parts=True)
        by_rank = [report["parts"] for report in reports]
        if all(by_rank):
            shares = contender.played.shares
            seconds = max(report["took"] for report in reports) / self.plan.parts
            for name in by_rank[0][0]:
                of_ranks = [fmean(step[name] for step in steps) for steps in by_rank]
                shares[name] = fmean(of_ranks) / seconds
            shares["rest"] = max(0.0, 1 - sum(shares.values()))
