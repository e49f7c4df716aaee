"""In the launcher: two contenders of one script that run in turns, block by block.

Both are started at the same time, by torchrun, and wait before their first model is wrapped. From
then on one of them runs while the other waits at the end of a step, so that both see the same
noise of the machine. Blocks are taken in the order A B, B A, A B, ..., and the first step of a
block is not counted: it finds caches full of the other's data.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tritonddp.cli.comparison.values import Capture
from tritonddp.cli.comparison.verdict import Launch
from tritonddp.cli.injection import COMPARE, environment

# tritonddp learns the order of gradients and more in the first 16.
LEAST_WARMUP = 20
_TIMED_WARMUP = 4  # the last ones of it tell how long a step takes
# A block lasts about so long, that there are enough of them, and has so many steps at most.
_BLOCK_SECONDS = 0.1
_BLOCK_STEPS = 100
_PAIRS = 24  # of blocks in a launch, fewer if steps are long
LEAST_PAIRS = 6
# More pairs are made until the error of a launch's mean ratio is down to this, within so long. It
# looks at how large the noise is and not at what comes out, so that no result is favoured.
_ERROR = 0.005
_LAUNCH_SECONDS = 30.0
_PARTS_STEPS, _TRAFFIC_STEPS = 12, 2
_LINES = 25  # of a log, when a script has failed
_TORCHRUNS = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
# Seconds for a launch to end. torchrun gives ranks that do not end when asked to 30 of them.
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
        labels: of the contenders, and
        kinds: which class wraps in each: "stock" or "tritonddp".
        warmup: steps before any is timed.
        steps: to be timed of each contender in a launch, None for as many as are useful.
        stall: seconds without news after which a script is given up.
    """

    command: Sequence[str]
    labels: tuple[str, str]
    kinds: tuple[str, str]
    warmup: int = LEAST_WARMUP
    steps: int | None = None
    stall: float = 600.0


@dataclass(frozen=True)
class Plan:
    """Steps of a block that are counted, and how many pairs of blocks a launch has.

    Attributes:
        block: steps.
        pairs: at least.
        seconds: for which the launch may go on with more pairs.
    """

    block: int
    pairs: int
    seconds: float = 0.0

    @classmethod
    def of(cls, seconds: float, steps: int | None) -> Plan:
        """For steps that take so many seconds."""
        block = max(1, min(_BLOCK_STEPS, round(_BLOCK_SECONDS / max(seconds, 1e-6))))
        if steps is None:
            fitting = int(_LAUNCH_SECONDS / (2 * (block + 1) * seconds))
            return cls(block, max(LEAST_PAIRS + 4, min(_PAIRS, fitting)), _LAUNCH_SECONDS)
        block = max(1, min(block, steps // LEAST_PAIRS))
        return cls(block, max(LEAST_PAIRS, -(-steps // block)))

    @classmethod
    def for_short(cls, steps: int) -> Plan | None:
        """For a script that makes no more steps than these after the warm-up; None if too few."""
        steps -= _PARTS_STEPS + _TRAFFIC_STEPS + 1
        for pairs in (12, LEAST_PAIRS):
            if steps // pairs >= 2:
                return cls(min(_BLOCK_STEPS, steps // pairs - 1), pairs)
        return None


@dataclass
class Played:
    """What a contender has shown in one launch.

    Attributes:
        blocks: seconds per step, of each block the slowest rank's.
        parts: means over steps and ranks, in seconds, by name; empty if not known.
        traffic: of rank 0, by name; empty if not known.
        peak: bytes, of the largest rank.
        captures: what ranks had at the first steps and later, by title.
        steps: how many it made.
    """

    blocks: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)
    peak: int = 0
    captures: dict[str, Capture] = field(default_factory=dict)
    steps: int = 0


class Contender:
    """The processes of one contender in one launch."""

    def __init__(self, job: Job, index: int, launch: str, address: Path, folder: Path) -> None:
        self.label = job.labels[index]
        self.name = f"{launch}-{index}"
        self.ranks: dict[int, Connection] = {}
        self.world_size = 0
        self.played = Played()
        self.token = secrets.token_hex(16)
        self.log = folder / f"{self.name}.log"
        self._stall = job.stall
        values = folder / f"{self.name}.values"
        values.mkdir()
        variables = environment(
            COMPARE,
            socket=str(address),
            contender=self.name,
            kind=job.kinds[index],
            seed=0,
            values=str(values),
            token=self.token,
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        with self.log.open("wb") as log:
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

    def add_rank(self, connection: Connection, hello: Mapping[str, Any]) -> None:
        self.ranks[hello["rank"]] = connection
        self.world_size = hello["world_size"]

    def order(self, do: str, **content: Any) -> list[dict[str, Any]]:
        """Give all ranks an order, and return what each reports, by rank.

        Raises:
            ScriptEnded: a rank is gone, or the whole script.
            ScriptError: it cannot be compared, or it made no step for too long.
        """
        self._send({"do": do, **content})
        reports: dict[int, dict[str, Any]] = {}
        captured: dict[str, dict[int, dict[str, Any]]] = {}
        waiting = {connection: rank for rank, connection in self.ranks.items()}
        last_news = time.monotonic()
        while waiting:
            ready = wait(list(waiting), 1.0)
            if ready:
                last_news = time.monotonic()
            elif self.process.poll() is not None:
                raise ScriptEnded(self, self.process.returncode)
            elif time.monotonic() - last_news > self._stall:
                raise ScriptError(
                    f"{self.label} took longer than {self._stall:g} s to make its steps. "
                    f"A larger --stall waits longer.\n{self.last_lines()}"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank, message = waiting[connection], self._receive(connection)
                if "error" in message:
                    raise ScriptError(message["error"])
                if "made" in message:
                    self.played.steps = max(self.played.steps, message["made"])
                elif "captured" in message:
                    captured.setdefault(message["captured"], {})[rank] = message
                else:
                    reports[rank] = message
                    del waiting[connection]
        for title, found in captured.items():
            if 0 not in found:  # only other ranks had gradients
                continue
            first = found[0]
            digests = {rank: message["digest"] for rank, message in found.items()}
            capture = Capture(digests, first["checksums"], first["path"])
            self.played.captures[title] = capture
        self.played.steps = max([self.played.steps, *(r["step"] for r in reports.values())])
        return [reports[rank] for rank in sorted(reports)]

    def _send(self, order: Mapping[str, Any]) -> None:
        for connection in self.ranks.values():
            with suppress(OSError):  # a rank is gone: found when its report is read
                connection.send_bytes(json.dumps(order).encode())

    def _receive(self, connection: Connection) -> dict[str, Any]:
        try:
            return json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            # The end of the script. The others may still be at it: torchrun knows how it ended.
            try:
                code = self.process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                code = 0
            raise ScriptEnded(self, code) from None

    def last_lines(self) -> str:
        """The last lines that the script has printed."""
        # torchrun's own report of a failure says less than the script's, and is longer.
        printed = self.log.read_text(errors="replace").partition(_TORCHRUNS)
        if printed[1]:
            printed = printed[0].rpartition("Traceback (most recent call last):")
        lines = printed[0].splitlines()
        ours = [line for line in lines if "torch/distributed/elastic" not in line]
        return f"The last lines of {self.label}:\n" + "\n".join(ours[-_LINES:])

    def failed(self, code: int, where: str = "") -> ScriptError:
        """The error of a script that has failed."""
        printed = self.log.read_text(errors="replace").lower()
        advice = ""
        if "out of memory" in printed:
            advice = " If there is no memory for two models, try --one-at-a-time."
        elif "address already in use" in printed:
            advice = " Both contenders run at once: if the script has a fixed port, try "
            advice += "--one-at-a-time."
        why = f"{self.label}'s script failed with exit code {code}{where}.{advice}"
        return ScriptError(f"{why}\n{self.last_lines()}")

    def end(self) -> None:
        """End all its processes."""
        self._send({"do": "end"})
        patience = _ENDING if self.ranks else 0.1
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        for connection in self.ranks.values():
            connection.close()
        self.kill()

    def kill(self) -> None:
        """Kill its processes and all that they have started: their variables have the token."""
        token = self.token.encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if token in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Launches:
    """Launches of a job, one after the other.

    Args:
        folder: for logs and values.
        advance: called as a launch goes on, with the part of it that is done since.
    """

    def __init__(self, job: Job, folder: Path, advance: Callable[[float], object]) -> None:
        self.plan: Plan | None = None
        self.world_size = 0
        self._job, self._folder, self._advance = job, folder, advance
        self._count = self._finished = 0

    def play(self, in_turns: bool) -> list[Played]:
        """Run both contenders of one launch, in turns or one after the other.

        Raises:
            ScriptError: it failed or is too short.
        """
        order = [0, 1] if self._finished % 2 == 0 else [1, 0]
        played: dict[int, Played] = {}
        for indices in [order] if in_turns else [[index] for index in order]:
            played |= self._long_enough(indices)
        self._finished += 1
        return [played[0], played[1]]

    def _long_enough(self, indices: Sequence[int]) -> dict[int, Played]:
        """Play, and once more with shorter blocks if the script was too short."""
        for _ in range(2):
            played = self._play(indices)
            if min(len(each.blocks) for each in played.values()) >= LEAST_PAIRS:
                return played
            steps = max(each.steps for each in played.values())  # one has ended, the other waited
            self.plan = Plan.for_short(steps - self._job.warmup)
            if self.plan is None:
                break
        least = self._job.warmup + 2 * LEAST_PAIRS + _PARTS_STEPS + _TRAFFIC_STEPS + 1
        raise ScriptError(
            f"the script is too short: it made {steps} steps, and at least {least} are needed, "
            f"of which {self._job.warmup} are for warming up. Let it make more."
        )

    def _play(self, indices: Sequence[int]) -> dict[int, Played]:
        """Play the contenders of these indices, the first one first."""
        self._count += 1
        with self._started(indices) as contenders:
            self.world_size = contenders[0].world_size
            try:
                seconds = max(self._warm_up(each) for each in contenders)
                if self.plan is None:
                    self.plan = Plan.of(seconds, self._job.steps)
                self._blocks(contenders, self.plan)
                for each in contenders:
                    self._probe(each)
            except ScriptEnded as end:
                if end.code:
                    raise end.contender.failed(end.code) from None
            return {index: each.played for index, each in zip(indices, contenders, strict=True)}

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
                    name = f"launch{self._count}"
                    contenders.append(Contender(self._job, index, name, address, self._folder))
                self._gather(listener, contenders)
                yield contenders
            except BaseException:
                for each in contenders:
                    each.kill()
                raise
            finally:
                for each in contenders:
                    each.end()
                address.unlink()

    def _gather(self, listener: socket.socket, contenders: Sequence[Contender]) -> None:
        by_name = {each.name: each for each in contenders}
        last_news = time.monotonic()
        while not all(each.is_there for each in contenders):
            for each in contenders:
                if each.process.poll() is not None:
                    if each.process.returncode:
                        where = " before it wrapped a model"
                        raise each.failed(each.process.returncode, where)
                    raise ScriptError(
                        f"{each.label}'s script ended, and wrapped no model with torch's "
                        f"DistributedDataParallel.\n{each.last_lines()}"
                    )
            if time.monotonic() - last_news > self._job.stall:
                late = next(each for each in contenders if not each.is_there)
                raise ScriptError(
                    f"{late.label}: {len(late.ranks)} of {late.world_size or 'its'} ranks wrapped "
                    f"a model with torch's DistributedDataParallel, and for {self._job.stall:g} s "
                    f"no other did. A larger --stall waits longer.\n{late.last_lines()}"
                )
            with suppress(TimeoutError, EOFError):
                accepted, _ = listener.accept()
                accepted.settimeout(None)
                connection = Connection(accepted.detach())
                hello = json.loads(connection.recv_bytes())
                if hello.get("contender") in by_name:
                    by_name[hello["contender"]].add_rank(connection, hello)
                    last_news = time.monotonic()

    def _warm_up(self, contender: Contender) -> float:
        """Warm up; returns the seconds of a step at its end."""
        timed = min(_TIMED_WARMUP, self._job.warmup - 1)
        reports = contender.order("steps", count=self._job.warmup, timed=timed)
        return max(report["took"] for report in reports) / timed

    def _blocks(self, contenders: Sequence[Contender], plan: Plan) -> None:
        order = list(contenders)
        end = time.monotonic() + plan.seconds
        number = 0
        while number < plan.pairs or (time.monotonic() < end and _is_noisy(contenders)):
            took = {}
            for each in order:
                reports = each.order("steps", count=plan.block + 1, timed=plan.block)
                took[each.name] = max(report["took"] for report in reports) / plan.block
            for each in order:
                each.played.blocks.append(took[each.name])
            order.reverse()
            number += 1
            if number == plan.pairs:  # after the same steps in all launches
                for each in order:
                    each.played.peak = max(r["peak"] for r in each.order("parameters"))
            if number <= plan.pairs:
                self._advance(1 / plan.pairs)

    def _probe(self, contender: Contender) -> None:
        """Note the parts and the traffic of some steps, which are not timed."""
        played = contender.played
        reports = contender.order("parts", count=_PARTS_STEPS)
        by_rank = [report["parts"] for report in reports if report["parts"]]
        if len(by_rank) == len(reports):
            for name in by_rank[0][0]:
                means = [sum(step[name] for step in steps) / len(steps) for steps in by_rank]
                played.parts[name] = sum(means) / len(means)
        traffic = contender.order("traffic", count=_TRAFFIC_STEPS)[0]["traffic"]
        played.traffic = dict(traffic or {})


def _is_noisy(contenders: Sequence[Contender]) -> bool:
    """Whether more pairs of blocks are wanted; never for a contender alone."""
    if len(contenders) != 2:
        return False
    return Launch.of(*(each.played.blocks for each in contenders)).error > _ERROR
