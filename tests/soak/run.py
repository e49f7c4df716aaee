"""Train for thousands of steps by random scenarios, beside an oracle, and watch what piles up.

python tests/soak/run.py                          10,000 steps
python tests/soak/run.py --seed 3 --steps 500     of other scenarios, and fewer
python tests/soak/run.py --leak file              with a planted leak
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

# In front of the folder of this file, whose modules are those of a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from differential.comparison import Judge
from differential.generator import scenario_of
from differential.in_ranks import OURS, arguments_of, configured, groups, play
from differential.player import Player
from differential.scenario import Options, Scenario, Step, ZeroGrad
from distributed import gather
from torch import nn

from soak.footprint import STEPS_FOR_MEMORY, Footprint, complaints, growth_of_memory
from tritonddp import DistributedDataParallel

RANKS = 2
STEPS = 10_000
# A life, that is a wrapper with its scenario, is long now and then, so that what piles up within
# one shows. It is measured in the middle, when all that comes with the first steps is there, and at
# its end; where no gradients are, of which there are now more, now fewer.
_EVERY = 6
LONG = 40
# Lives until all that is made once is there.
_WARM_UP = 3
# So many of the last actions are shown where the soak fails.
_SHOWN = 30
# Seconds that a rank waits for the other.
_TIMEOUT = 60


class Failed(BaseException):
    """The soak has found something: no error of what it plays."""


@dataclass(frozen=True)
class Report:
    """What a soak saw on one rank.

    Attributes:
        taken: footprints.
        exact, rounded: tensors with the bits of the oracle's, and others.
        farthest: how far one was from the oracle's at most, by what rounding allows.
        lives: how many there were.
        grown: what grew.
    """

    taken: list[Footprint]
    exact: int
    rounded: int
    farthest: float
    lives: int
    grown: list[str]


# What a step may leak, to see that it is found.
_leaked: list[Any] = []
LEAKS: dict[str | None, Callable[[], None]] = {
    None: lambda: None,
    "tensor": lambda: _leaked.append(torch.zeros(8)),
    "memory": lambda: _leaked.append(os.urandom(4096)),
    "object": lambda: _leaked.append([]),
    "file": lambda: _leaked.append(os.open(os.devnull, os.O_RDONLY)),
}


def lives(seed: int, steps: int) -> Iterator[tuple[Scenario, int]]:
    """Scenarios that have this many steps together, and how many each has."""
    draw = Random(seed)
    number, done = 0, 0
    while done < steps:
        length = max(LONG, steps // 20) if number % _EVERY == 0 else draw.randint(8, 24)
        if steps - done - length < 5:  # a life of a step or two sees little
            length = steps - done
        kind = "usual" if number % 4 else "sharded"  # every other one of those that are long
        yield scenario_of(seed * 100_000 + number, RANKS, length, kind), length
        number, done = number + 1, done + length


class _Life:
    """One scenario as it is played on this rank: each step is judged, and some are measured."""

    def __init__(self, soak: _Soak, scenario: Scenario, is_long: bool) -> None:
        self._soak, self._scenario = soak, scenario
        self._judge = Judge(scenario, OURS)
        self._steps = scenario.actions.count(Step())
        self._done = 0
        # Behind a step: no backward of an earlier forward is to come.
        behind = zip(scenario.actions, scenario.actions[1:], strict=False)
        bare = [n for n, each in enumerate(behind, 1) if each == (Step(), ZeroGrad(True, False))]
        later = [n for n in bare if scenario.actions[:n].count(Step()) >= self._steps // 2]
        self._measured = {later[0], later[-1]} if is_long and later else set()

    def after(self, player: Player, number: int) -> None:
        """Called after each action, and at the end."""
        is_end = number == len(self._scenario.actions)
        is_step = not is_end and isinstance(self._scenario.actions[number], Step)
        if is_step:
            self._done += 1
            self._soak.leak()
        # (Inside join() the ranks take different numbers of steps.)
        if is_end or (is_step and not self._scenario.counts):
            self._compare(player, number + 1)
        if number in self._measured:
            player.forget_outputs()
            self._judge.forget_outputs()
            self._soak.measure(player, self._done)
        if is_step:
            self._soak.step()

    def _compare(self, player: Player, end: int) -> None:
        traces, metrics = zip(*gather((player.trace, player.metrics)), strict=True)
        player.trace, player.metrics = [], []
        found = next(self._judge.differences(traces, end), None)
        if found is None and not self._scenario.counts and any(e != metrics[0] for e in metrics):
            found = f"metrics() differ between ranks: {metrics}"
        if found is not None:
            first = len(str(self._scenario).splitlines()) - len(self._scenario.actions)
            told = str(self._scenario).splitlines()[: first + end]
            told[first:-_SHOWN] = ["  ..."]
            raise Failed("\n".join([f"{self._soak.where}: {found}", *told]))
        if end > len(self._scenario.actions):
            self._soak.judged(self._judge)


class _Soak:
    """What goes on from life to life."""

    def __init__(self, leak: str | None, progress: Callable[[Footprint | None], None]) -> None:
        self.leak, self._progress = LEAKS[leak], progress
        self.taken: list[Footprint] = []
        self.lives = self.steps = self._begun = 0
        self.exact = self.rounded = 0
        self.farthest = 0.0

    @property
    def where(self) -> str:
        return f"step {self.steps}, life {self.lives}"

    def live(self, scenario: Scenario, steps: int) -> None:
        self.lives += 1
        self._begun = self.steps
        life = _Life(self, scenario, steps >= LONG)
        with configured(scenario.seed, scenario.thresholds):
            play(scenario, OURS, DistributedDataParallel, scenario.options, life.after)
        del life
        while self.steps < self._begun + steps:  # those that this rank had no inputs for
            self.step()
        self.taken.append(Footprint.now(self.steps))

    def step(self) -> None:
        self.steps += 1
        self._progress(self.taken[-1] if self.taken else None)

    def measure(self, player: Player, done: int) -> None:
        trained = sum(param.requires_grad for param in player.net.parameters())
        self.taken.append(Footprint.now(self._begun + done, self.lives, trained))

    def judged(self, judge: Judge) -> None:
        self.exact, self.rounded = self.exact + judge.exact, self.rounded + judge.rounded
        self.farthest = max(self.farthest, judge.farthest)


def soak(
    seed: int,
    steps: int,
    leak: str | None = None,
    progress: Callable[[Footprint | None], None] = lambda _: None,
) -> Report:
    """Play the lives of ``seed`` on this rank, one of two.

    Args:
        seed, steps: of :func:`lives`.
        leak: a key of :data:`LEAKS`.
        progress: called after each step, with what was measured last.

    Raises:
        Failed: a rank has seen something else than the oracle, or than the other.
    """
    _warm_up()
    gc.collect()
    gc.freeze()  # measurements look at what the soak makes, not at all of torch
    found = _Soak(leak, progress)
    warm = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scenario, length in lives(seed, steps):
            found.live(scenario, length)
            if found.lives == _WARM_UP:
                warm = max(found.steps, steps // 4)
    taken = found.taken
    grown = [f"rank {dist.get_rank()}: {each}" for each in complaints(taken, warm, steps)]
    _leaked.clear()
    everywhere = [each for rank in gather(grown) for each in rank]
    return Report(taken, found.exact, found.rounded, found.farthest, found.lives, everywhere)


def _warm_up() -> None:
    """Have all that is made once, by whichever scenario asks for it first."""
    groups.clear()
    for options in (
        Options(process_group="new"),
        Options(device_mesh=True),
        Options(compression="int8"),
    ):
        ddp = DistributedDataParallel(nn.Linear(64, 64), **arguments_of(options))
        ddp(torch.ones(1, 64)).sum().backward()


# The command: starts two processes, of which rank 0 tells how it goes.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the scenarios (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--leak", choices=[each for each in LEAKS if each], help="plant one")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="tritonddp-soak-") as folder:
        try:
            torch.multiprocessing.spawn(_run_rank, (arguments, f"{folder}/store"), RANKS)
        except torch.multiprocessing.ProcessExitedException as failure:
            return failure.exit_code
    return 0


def _run_rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("tritonddp").setLevel(logging.ERROR)  # backwards break off on purpose
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    start = time.monotonic()
    with _progress_bar(arguments.steps, quiet=rank > 0) as progress:
        try:
            report = soak(arguments.seed, arguments.steps, arguments.leak, progress)
        except (Exception, Failed):
            failure = traceback.format_exc()
            print(
                f"\nsoak failed on rank {rank}: {failure}{_again(arguments)}",
                file=sys.stderr,
                flush=True,
            )
            sys.exit(1)
    if rank == 0:
        print(_told(report, arguments, time.monotonic() - start), flush=True)
    dist.destroy_process_group()
    sys.exit(int(bool(report.grown)))


def _again(arguments: argparse.Namespace) -> str:
    """How to see it once more. (With fewer steps there are other wrappers.)"""
    leak = f" --leak {arguments.leak}" if arguments.leak else ""
    return f"again: make soak ARGS='--seed {arguments.seed} --steps {arguments.steps}{leak}'"


@contextmanager
def _progress_bar(steps: int, quiet: bool) -> Iterator[Callable[[Footprint | None], None]]:
    """Steps per second and memory, on the terminal."""
    if quiet:
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=steps, unit="step", mininterval=1.0, smoothing=0.05) as bar:

        def step(last: Footprint | None) -> None:
            if last is not None:
                bar.set_postfix_str(f"{last.memory / 2**20:.1f} MiB", refresh=False)
            bar.update()

        yield step


def _told(report: Report, arguments: argparse.Namespace, seconds: float) -> str:
    """The figures of rank 0, and what grew on any."""
    taken = report.taken
    last = taken[-1]
    lines = [
        f"seed {arguments.seed}: {arguments.steps} steps in {seconds:.0f} s, "
        f"{report.lives} wrappers, {len(taken)} measurements",
        f"memory: {last.memory / 2**20:.1f} MiB, most in the last quarter against the second: "
        f"{growth_of_memory(taken, arguments.steps):+.2%}"
        + ("" if arguments.steps >= STEPS_FOR_MEMORY else " (too few steps to judge)"),
        f"file descriptors: {last.files}, threads: {last.threads}, tensors that outlive a "
        f"wrapper: {last.tensors}, objects: {last.objects}",
        f"tensors compared: {report.exact} have the oracle's bits, {report.rounded} are at most "
        f"{report.farthest:.2f} times as far from it as rounding may bring them",
    ]
    if report.grown:
        lines += ["", *report.grown, _again(arguments)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
