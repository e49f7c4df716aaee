"""In the launcher: two contenders of one script, in turns.

In a launch *in turns*, torchrun starts both at the same time, and both wait before their first
model is wrapped. From then on, one of them runs while the other waits at the end of a step, so that
both see the same noise of the machine. The order of the blocks is A B, B A, A B, ...

If that is not possible, because the script is short, fails, hangs or cannot run twice at the same
time, contenders run alone, one whole launch after the other, in the same order.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean

from tritonddp.cli.comparison.contender import (
    ENDED,
    FAILED,
    SILENT,
    STOPPED,
    Contender,
    Outcome,
    Played,
    RankEnded,
    ScriptError,
)
from tritonddp.cli.comparison.verdict import Launch
from tritonddp.cli.terminal import Progress

# Untimed steps at the start: in the first 16, tritonddp learns the order of gradients, among other
# things. If steps are long, only as many as fit into half of _SECONDS, but at least LEAST_WARMUP.
WARMUP, LEAST_WARMUP, _SECONDS = 20, 5, 10.0
_FIRST = 1  # number of these steps that do not count for the estimated step time
# Approximate duration of a block, chosen to get enough blocks; maximum number of its steps.
_BLOCK_SECONDS, _BLOCK_STEPS = 0.1, 100
_LONG_STEP = 0.5  # seconds; such a step does not depend on the previous content of caches
_PAIRS, _LEAST_PAIRS = 32, 6  # pairs of blocks in a launch, fewer if steps are long
_LONG_LAUNCH = 60.0  # seconds, after which two pairs are enough for a launch
_LONGEST_HELLO = 1000  # bytes in which a rank identifies itself
# Seconds without a report after which the other contender gets its turn, or the launch ends.
_PATIENCE, _MOST_PATIENCE = 30.0, 600.0
_LEAST_STEPS = 2
# A contender hangs if it is silent for this multiple of the other's longest silence.
_SURELY = 3.0


@dataclass(frozen=True)
class Plan:
    """The steps of a launch in turns, the same in all launches."""

    warmup: int  # untimed steps after the first ones, and before parts are recorded
    block: int  # counted steps of a block
    skipped: int  # untimed steps at the start of a block, with the other contender's data in caches
    pairs: int  # number of pairs of blocks

    def steps_of(self, pairs: int) -> int:
        """Return the number of steps that a script needs for ``pairs`` of blocks."""
        # See Launches._warm_up() and Launches._probe().
        return LEAST_WARMUP + 2 * self.warmup + 2 + pairs * (self.skipped + self.block)

    @classmethod
    def of(cls, seconds: float) -> Plan:
        """Return the plan for steps that take ``seconds``."""
        fitting = int(_SECONDS / seconds)
        block = max(1, min(_BLOCK_STEPS, round(_BLOCK_SECONDS / seconds)))
        skipped = 0 if seconds > _LONG_STEP else 1
        return cls(
            warmup=max(LEAST_WARMUP, min(WARMUP, fitting // 2) - LEAST_WARMUP),
            block=block,
            skipped=skipped,
            pairs=max(_LEAST_PAIRS, min(_PAIRS, fitting // (2 * (block + skipped)))),
        )


@dataclass(frozen=True)
class Pair:
    """One launch of both contenders, or one of each."""

    first: Played
    second: Played
    time: Launch | None  # seconds per step; None if there were no steps to compare
    counted: int = 0  # counted steps of whole launches

    @property
    def outcomes(self) -> tuple[Outcome, Outcome] | None:
        """Outcomes of whole launches."""
        first, second = self.first.outcome, self.second.outcome
        return None if first is None or second is None else (first, second)

    @property
    def has_failed(self) -> bool:
        """Whether the script itself failed, with both contenders."""
        return self.outcomes is not None and all(each.how == FAILED for each in self.outcomes)


class _NotInTurns(Exception):
    """The script cannot be compared in turns. The results so far are in ``pair``, if any."""

    def __init__(self, why: str, pair: Pair | None = None) -> None:
        super().__init__(why)
        self.pair = pair


class _NoModel(Exception):
    """A script ended before it wrapped a model."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender.label)
        self.contender = contender


class _SpawnsRanks(Exception):
    """The script starts its own ranks."""


class EndedEarly(ScriptError):
    """A launch made far fewer steps than one before it. The message has the likely reason."""


class Launches:
    """Launches of both contenders, one after the other.

    A contender whose label is not :data:`contender.OURS` uses torch's class.

    Args:
        script: its words, as Python takes them, with ``-m`` before the name of a module.
        nproc: torchrun's ``--nproc-per-node``.
        in_turns: start with a launch in turns.
        keeps_files: do not redirect files of the script; see ``scratch.py``.
    """

    def __init__(
        self,
        script: Sequence[str],
        nproc: str,
        labels: Sequence[str],
        folder: Path,
        progress: Progress,
        *,
        in_turns: bool = True,
        keeps_files: bool = False,
    ) -> None:
        self.pairs: list[Pair] = []
        self.plan: Plan | None = None
        self.world_size = 0
        self.started = 0.0  # when the ranks of the first launch reached their first model
        self.load, _, _ = os.getloadavg()  # load of the machine before the first launch
        self.in_turns = in_turns
        self.patience = _PATIENCE  # seconds, for a contender that runs alone
        self.labels, self.progress = labels, progress
        self._script, self._nproc, self._folder = script, nproc, folder
        self._keeps_files = keeps_files
        self._spawns = False  # the script starts its own ranks
        self._made = 0  # steps in the longest launch so far
        self._most: int | None = None  # steps after which a whole launch is stopped

    @property
    def times(self) -> list[Launch]:
        """Step times of each launch that has them."""
        return [pair.time for pair in self.pairs if pair.time is not None]

    def play(self) -> None:
        """Run both contenders once, in turns if possible.

        Raises:
            EndedEarly: one of them made far fewer steps than before.
            ScriptError: the script cannot be compared, or fails with both contenders.
        """
        pair: Pair | None = None
        while pair is None:
            try:
                pair = self._play_in_turns() if self.in_turns else self._play_alone()
            except _NotInTurns as why:
                pair, self.in_turns = why.pair, False
                self.progress.say(
                    f"{why}: running whole launches from here on, one contender at a time"
                )
            except _SpawnsRanks:
                self.in_turns, self._spawns = False, True
                self.progress.say(
                    "the script starts its own ranks, so it is run with python instead of "
                    "torchrun: whole launches, one contender at a time"
                )
        self.pairs.append(pair)

    def _labels(self) -> Sequence[str]:
        """Return the labels of this launch, in starting order."""
        return self.labels[:: 1 if len(self.pairs) % 2 == 0 else -1]

    # Both at the same time

    def _play_in_turns(self) -> Pair:
        began = time.monotonic()
        try:
            with self._started(self._labels()) as contenders, suppress(RankEnded):
                try:
                    self._warm_up(contenders)
                    for each in contenders:
                        self._probe(each)
                    self._blocks(contenders)
                finally:
                    self._made = max([self._made, *(each.done for each in contenders)])
                    slowest = max(each.longest for each in contenders)
                    self.patience = min(_MOST_PATIENCE, max(self.patience, _SURELY * slowest))
        except _NoModel as ended:
            raise _NotInTurns(
                f"{ended} wraps no model when run in parallel with the other contender"
            ) from ended
        played = {each.label: each.played for each in contenders}
        first, second = (played[label] for label in self.labels)
        least = _LEAST_PAIRS if time.monotonic() < began + _LONG_LAUNCH else 2
        if min(len(first.blocks), len(second.blocks)) < least:
            shown = Pair(first, second, None) if first.captures and second.captures else None
            needs = f" (it needs {self.plan.steps_of(least)})" if self.plan is not None else ""
            raise _NotInTurns(f"the script has too few steps for alternating blocks{needs}", shown)
        return Pair(first, second, Launch.of(first.blocks, second.blocks))

    def _warm_up(self, contenders: Sequence[Contender]) -> None:
        """Warm up. In the first launch, derive the plan from the length of a step."""
        self.progress.stage = "both contenders warm up"
        seconds = self._turn(contenders, LEAST_WARMUP, _FIRST)
        plan = self.plan or Plan.of(min(seconds))
        seconds += self._turn(contenders, plan.warmup)
        if self.plan is None:  # the very first steps may take far longer
            self.plan = replace(Plan.of(min(seconds)), warmup=plan.warmup)
            self.progress.say(f"a step takes about {1e3 * min(seconds):.3g} ms")

    def _blocks(self, contenders: Sequence[Contender]) -> None:
        """Time blocks of steps in turns."""
        order, plan, began = list(contenders), self.plan, time.monotonic()
        assert plan is not None
        for number in range(plan.pairs):
            if number >= 2 and time.monotonic() > began + _LONG_LAUNCH:
                return
            self.progress.stage = f"{number} of {plan.pairs} pairs of blocks"
            pair = self._turn(order, plan.skipped + plan.block, plan.skipped)
            for each, seconds in zip(order, pair, strict=True):
                each.played.blocks.append(seconds)
            order.reverse()

    def _probe(self, contender: Contender) -> None:
        """Record the parts of some steps. This does not count toward the time of a step."""
        assert self.plan is not None
        self.progress.stage = f"the parts of {contender.label}'s steps"
        # At the end of a step, the parts of the previous step are known; see the recorder.
        contender.give(self.plan.warmup + 2, 2, parts=True)
        try:
            if contender.finish(_PATIENCE):
                contender.note_parts()
        except RankEnded:
            _check_end(contender)
            raise

    def _turn(self, contenders: Sequence[Contender], count: int, skipped: int = 0) -> list[float]:
        """Let each contender in turn run steps. Return the seconds per step on the slowest rank.

        Raises:
            RankEnded: the script ended with exit code 0.
            _NotInTurns: it failed, or made no step while the other contender did.
        """
        ended, late = [], []
        for each in contenders:
            each.give(count, skipped)
            try:
                if not each.finish(_PATIENCE):
                    late.append(each)
            except RankEnded:
                ended.append(each)
        # If all are late, steps are long, for example because torch compiles in them.
        is_long = len(late) == len(contenders) > 1
        for each in late:
            try:
                if not is_long or not each.finish(_MOST_PATIENCE):
                    raise _NotInTurns(f"{each.label} made no step while the other contender did")
            except RankEnded:
                ended.append(each)
        for each in ended:
            _check_end(each)
        if ended:
            raise RankEnded
        slowest = [max(of["took"] for of in each.reports.values()) for each in contenders]
        return [max(took, 1e-6) / (count - skipped) for took in slowest]

    # One at a time

    def _play_alone(self) -> Pair:
        """Run a launch of each. Repeat with more patience until it is clear which one hangs."""
        while True:
            played = {label: self._alone(label) for label in self._labels()}
            first, second = (played[label] for label in self.labels)
            pair = Pair(first, second, None)
            assert pair.outcomes is not None
            patience = _needed_patience(*pair.outcomes)
            if patience <= self.patience:
                return self._timed(pair, *pair.outcomes)
            self.patience = patience
            self.progress.say(f"repeating with {patience:.0f} s per step")

    def _timed(self, pair: Pair, first: Outcome, second: Outcome) -> Pair:
        """Return ``pair`` with step times, if both contenders ended in the same way.

        Raises:
            EndedEarly: one of them made far fewer steps than before.
            ScriptError: they made too few steps, or both fail.
        """
        counted = min(first.steps, second.steps)
        are_right = first.is_right and second.is_right
        are_alike = _have_same_end(first, second)
        if not (first.is_right or second.is_right or are_alike):
            hows = [f"{of.how} after {of.steps} steps" for of in (first, second)]
            raise ScriptError(
                f"the script fails with both contenders: {self.labels[0]} {hows[0]}, "
                f"{self.labels[1]} {hows[1]}.\nThe last lines of {self.labels[0]}:\n{first.last}"
                + f"\nThe last lines of {self.labels[1]}:\n{second.last}"
                * (hows[0] != hows[1])
            )
        # In the first two launches, the contenders may differ if both have steps to compare.
        made = self._made if counted >= _LEAST_STEPS else max(self._made, first.steps)
        for label, outcome in zip(self.labels, (first, second), strict=True):
            if are_right and outcome.how == ENDED and outcome.steps < made / 2:
                raise EndedEarly(
                    f"a launch of {label} ended after {outcome.steps} steps, but an earlier one "
                    f"made {made}: the script has probably resumed from a file that it wrote."
                )
        if are_right and counted < _LEAST_STEPS:
            raise ScriptError(
                f"the script is too short: it made {counted} step{'s' * (counted != 1)}, but "
                f"timing requires {_LEAST_STEPS}"
            )
        self._made = max(self._made, first.steps, second.steps)
        if are_alike and SILENT in (first.how, second.how):
            self._most = counted  # skip what follows, for example an evaluation, from now on
        if not are_right and not are_alike:
            return pair
        return replace(pair, time=_time(pair, counted), counted=counted)

    def _alone(self, label: str) -> Played:
        """Run a launch of one contender until it ends, or for as many steps as the first one."""
        try:
            with self._started([label]) as (contender,):
                contender.played.outcome = self._followed(contender)
        except _NoModel as ended:
            contender = ended.contender
            contender.played.outcome = contender.end()
            if contender.played.outcome.is_right:
                raise ScriptError(
                    "the script ended before it wrapped a model with torch's "
                    f"DistributedDataParallel. Its last lines:\n{contender.last_lines()}"
                ) from ended
        return contender.played

    def _followed(self, contender: Contender) -> Outcome:
        """Let a contender that runs alone make its steps. Return how it ended."""
        began = time.monotonic()
        try:
            while self._most is None or contender.steps < self._most:
                self.progress.stage = f"{contender.label} alone: step {contender.steps}"
                contender.give(
                    (self._most or contender.steps + WARMUP) - contender.steps, each=True
                )
                if not contender.finish(self.patience):
                    return contender.outcome(SILENT)
                is_long = contender.steps >= 2 * WARMUP and time.monotonic() > began + _SECONDS
                if self._most is None and is_long and contender.steps > self._made + WARMUP:
                    self._most = contender.steps
        except RankEnded:
            return contender.end()
        return contender.outcome(STOPPED)

    # The processes

    @contextmanager
    def _started(self, labels: Sequence[str]) -> Iterator[list[Contender]]:
        """Start the contenders, whose ranks wait before their first model.

        Raises:
            _NoModel: a contender ended before.
            _SpawnsRanks: a contender starts its own ranks under torchrun.
        """
        command = list(self._script)
        if not self._spawns:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command = [*torchrun, self._nproc, "--log-dir", str(self._folder), *command]
        contenders: list[Contender] = []
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            session = {"port": listener.getsockname()[1], "spawns": self._spawns}
            for label in labels:
                to = (command, label, self._folder, self.progress, session)
                contenders.append(Contender(*to, keeps_files=self._keeps_files))
                stack.callback(contenders[-1].kill)
            self._gather(listener, contenders)
            self.world_size = contenders[0].world_size
            self.started = self.started or time.monotonic()
            yield contenders

    def _gather(self, listener: socket.socket, contenders: Sequence[Contender]) -> None:
        """Wait until all ranks have reached their first model."""
        by_token = {each.token: each for each in contenders}
        silent: list[Connection] = []  # connections that have not identified themselves
        while not all(0 < each.world_size == len(each.ranks) for each in contenders):
            there = sum(len(each.ranks) for each in contenders)
            self.progress.stage = (
                f"the script is starting; {there} ranks have reached their first model"
            )
            self.progress.tick(contenders[-1].last_line)
            for each in contenders:
                if each.process.poll() is not None:
                    raise _NoModel(each)
            for ready in wait([listener, *silent], 0.5):
                if not isinstance(ready, Connection):  # the listener
                    accepted, _ = listener.accept()
                    accepted.setblocking(False)
                    silent.append(Connection(accepted.detach()))
                    continue
                silent.remove(ready)
                with suppress(OSError, EOFError, ValueError):  # an unrelated connection
                    hello = json.loads(ready.recv_bytes(_LONGEST_HELLO))
                    if contender := by_token.get(hello.get("contender")):
                        if "spawns" in hello:
                            raise _SpawnsRanks
                        os.set_blocking(ready.fileno(), True)
                        contender.ranks[hello["rank"]] = ready
                        contender.pids.append(hello["pid"])
                        contender.world_size = hello["world_size"]


def _have_same_end(first: Outcome, second: Outcome) -> bool:
    """Return whether both made the same steps, and neither alone failed afterwards.

    After its last step, a script may evaluate or end slowly.
    """
    is_same = first.how == second.how or FAILED not in (first.how, second.how)
    return is_same and first.steps == second.steps >= _LEAST_STEPS


def _check_end(contender: Contender) -> None:
    """Raise _NotInTurns unless a script with an ended rank ends with exit code 0."""
    if (outcome := contender.end()).how != ENDED:
        raise _NotInTurns(
            f"{contender.label} {outcome.how} while running in parallel with the other contender"
        )


def _needed_patience(first: Outcome, second: Outcome) -> float:
    """Return the seconds per step that distinguish these outcomes from slow steps."""
    if _have_same_end(first, second):
        return 0.0
    if first.how == second.how == SILENT:
        return _MOST_PATIENCE
    if SILENT in (first.how, second.how):
        other = second if first.how == SILENT else first
        return min(_MOST_PATIENCE, _SURELY * other.longest)
    return 0.0


def _time(pair: Pair, counted: int) -> Launch:
    """Return the seconds per step of both contenders, without warm-up steps."""
    skipped = min(WARMUP, counted // 2)
    first, second = (
        max(fmean(steps[skipped:counted]) for steps in played.steps.values())
        for played in (pair.first, pair.second)
    )
    return Launch(first, second)
