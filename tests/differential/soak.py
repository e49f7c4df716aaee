"""Programs of thousands of steps, beside the oracle: does anything pile up, or drift?

``python tests/differential/run.py --steps 10000`` plays them.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from random import Random

import torch
import torch.distributed as dist
from distributed import gather
from torch import nn

from differential.actions.training import Step, ZeroGrad
from differential.comparison import Judge
from differential.footprint import Footprint, complaints, growth_of_memory
from differential.in_ranks import OURS, arguments_of, configured, groups, play
from differential.kinds import KINDS
from differential.player import Player
from differential.program import Options, Program
from tritonddp import DistributedDataParallel

RANKS = 2
# A life, that is a wrapper with its program, is long now and then, so that what piles up within
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


def lives(seed: int, steps: int) -> Iterator[tuple[Program, int]]:
    """Programs that have this many steps together, and how many each has."""
    draw = Random(seed)
    number, done = 0, 0
    while done < steps:
        length = max(LONG, steps // 20) if number % _EVERY == 0 else draw.randint(8, 24)
        if steps - done - length < 5:  # a life of a step or two sees little
            length = steps - done
        kind = "usual" if number % 4 else "sharded"  # every other one of those that are long
        yield KINDS[kind](seed * 100_000 + number, RANKS, length), length
        number, done = number + 1, done + length


class Soak:
    """Lives, one after the other, on this rank.

    Args:
        leak: called after each step.
        progress: likewise, with what was measured last.

    Attributes:
        taken: footprints.
        farthest: how far a tensor was from the oracle's at most, by what rounding allows.
        lives, steps: how many there were.
        grown: what grew, on any rank.
    """

    def __init__(
        self, leak: Callable[[], object], progress: Callable[[list[Footprint]], None]
    ) -> None:
        self._leak, self._progress = leak, progress
        self.taken: list[Footprint] = []
        self.lives = self.steps = 0
        self.farthest = 0.0
        self.grown: list[str] = []

    def live(self, program: Program, steps: int) -> None:
        """Play one, and see what is left of it."""
        self.lives += 1
        begun = self.steps
        self._play(program, steps)
        while self.steps < begun + steps:  # those that this rank had no inputs for
            self._step()
        self.taken.append(Footprint.now(self.steps))

    def _play(self, program: Program, steps: int) -> None:
        """Each step is judged, and if it is a long life some are measured."""
        judge, measured = Judge(program, OURS), _measured(program, steps)

        def after(player: Player, number: int) -> None:
            is_end = number == len(program.actions)
            is_step = not is_end and isinstance(program.actions[number], Step)
            if is_step:
                self._leak()
            # (Inside join() the ranks take different numbers of steps.)
            if is_end or (is_step and not program.counts):
                self._judge(judge, program, player, number + 1)
            if number in measured:
                player.forget_outputs()
                judge.forget_outputs()
                trained = sum(param.requires_grad for param in player.net.parameters())
                self.taken.append(Footprint.now(self.steps, self.lives, trained))
            if is_step:
                self._step()

        with configured(program.seed, program.thresholds):
            play(program, OURS, DistributedDataParallel, program.options, after)
        self.farthest = max(self.farthest, judge.farthest)

    def _step(self) -> None:
        self.steps += 1
        self._progress(self.taken)

    def _judge(self, judge: Judge, program: Program, player: Player, end: int) -> None:
        traces, metrics = zip(*gather((player.trace, player.metrics)), strict=True)
        player.trace, player.metrics = [], []
        found = next(judge.differences(traces, end), None)
        if found is None and not program.counts and any(each != metrics[0] for each in metrics):
            found = f"metrics() differ between ranks: {metrics}"
        if found is not None:
            head, *actions = str(program).split("\n  ")
            shown = "\n  ".join([head, "...", *actions[:end][-_SHOWN:]])
            raise Failed(f"step {self.steps}, life {self.lives}: {found}\n{shown}")

    def __str__(self) -> str:
        """The figures of this rank."""
        last = self.taken[-1]
        return (
            f"{self.lives} wrappers; memory: {last.memory / 2**20:.1f} MiB, most in the last "
            f"quarter against the second: {growth_of_memory(self.taken, self.steps):+.2%} (below "
            f"2000 steps this says little); files: {last.files}, threads: {last.threads}, "
            f"tensors that outlive a wrapper: {last.tensors}, objects: {last.objects}; tensors are "
            f"at most {self.farthest:.2f} times as far from the oracle's as rounding may bring them"
        )


def _measured(program: Program, steps: int) -> set[int]:
    """Numbers of the actions behind which a long life is measured."""
    # Behind a step: no backward of an earlier forward is to come.
    behind = zip(program.actions, program.actions[1:], strict=False)
    bare = [n for n, each in enumerate(behind, 1) if each == (Step(), ZeroGrad(True, False))]
    later = [n for n in bare if program.actions[:n].count(Step()) >= steps // 2]
    return {later[0], later[-1]} if steps >= LONG and later else set()


def soak(
    seed: int,
    steps: int,
    leak: Callable[[], object] = lambda: None,
    progress: Callable[[list[Footprint]], None] = lambda _: None,
) -> Soak:
    """Play the lives of ``seed`` on this rank, one of two.

    Args:
        seed, steps: of :func:`lives`.
        leak, progress: of :class:`Soak`.

    Raises:
        Failed: a rank has seen something else than the oracle, or than the other.
    """
    # Have all that is made once, by whichever program asks for it first.
    groups.clear()
    for options in (
        Options(process_group="new"),
        Options(device_mesh=True),
        Options(compression="int8"),
    ):
        ddp = DistributedDataParallel(nn.Linear(64, 64), **arguments_of(options))
        ddp(torch.ones(1, 64)).sum().backward()
    del ddp
    gc.collect()
    gc.freeze()  # measurements look at what the soak makes, not at all of torch
    found, warm = Soak(leak, progress), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program, length in lives(seed, steps):
            found.live(program, length)
            if found.lives == _WARM_UP:
                warm = max(found.steps, steps // 4)
    grown = [f"rank {dist.get_rank()}: {each}" for each in complaints(found.taken, warm, steps)]
    found.grown = [each for rank in gather(grown) for each in rank]
    return found


def main(seed: int, steps: int) -> int:
    """Play in two processes, and print what was found; returns an exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="tritonddp-soak-") as folder:
        try:
            torch.multiprocessing.spawn(_run_rank, (seed, steps, f"{folder}/store"), RANKS)
        except torch.multiprocessing.ProcessExitedException as failure:
            return failure.exit_code
    return 0


def _run_rank(rank: int, seed: int, steps: int, store: str) -> None:
    from tqdm import tqdm

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
    # (With fewer steps there are other wrappers.)
    again = f"again: python tests/differential/run.py --seed {seed} --steps {steps}"
    with tqdm(total=steps, unit="step", mininterval=1.0, disable=rank > 0) as bar:

        def progress(taken: list[Footprint]) -> None:
            if taken:
                bar.set_postfix_str(f"{taken[-1].memory / 2**20:.1f} MiB", refresh=False)
            bar.update()

        try:
            found = soak(seed, steps, progress=progress)
        except (Exception, Failed):
            failure = f"\nsoak failed on rank {rank}: {traceback.format_exc()}{again}"
            print(failure, file=sys.stderr, flush=True)
            sys.exit(1)
    if rank == 0:
        print(f"seed {seed}: {steps} steps in {time.monotonic() - start:.0f} s, {found}")
        print("\n".join([*found.grown, again] if found.grown else []), flush=True)
    dist.destroy_process_group()
    sys.exit(int(bool(found.grown)))
