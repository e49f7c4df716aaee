"""Programs of thousands of steps, compared with the oracle: does anything grow, or drift?

``python tests/differential/run.py --steps 10000`` plays them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist
from distributed import gather
from torch import nn

from differential.actions.training import Step, ZeroGrad
from differential.comparison import Judge
from differential.in_ranks import OURS, configured, groups, play
from differential.kinds import KINDS
from differential.player import Player
from differential.program import Program
from tritonddp import DistributedDataParallel

RANKS = 2
# Every sixth wrapper lives long. It is measured in the middle and at the end of its life.
_EVERY, _LONG = 6, 40
_SHOWN = 30  # of the last actions are shown if the soak fails
_TIMEOUT = 60  # seconds that a rank waits for the other
# Between the second and the last quarter of a run, which has at least this many steps, memory may
# grow by this share.
STEPS_FOR_MEMORY, MOST_GROWTH = 2000, 0.01
# Python may keep this many more.
_FEW = {"tensors": 15, "objects": 500}


class Failed(BaseException):
    """The soak has found a difference. Not an Exception, which a program might raise."""


class Footprint(NamedTuple):
    """What a process holds."""

    step: int  # of the soak, after which it was taken
    life: int  # number of the wrapper; 0 between two wrappers
    trained: int  # how many parameters of the wrapper are trained
    memory: int  # bytes of private pages
    files: int  # open file descriptors
    threads: int
    tensors: int  # known to the garbage collector, as the next
    objects: int


def footprint(step: int, life: int = 0, trained: int = 0) -> Footprint:
    """Measure (takes some 0.2 s)."""
    counts = []
    for _ in range(3):
        time.sleep(0.02)  # threads of gloo release what they have sent
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(1 for each in objects if issubclass(type(each), torch.Tensor))
        counts.append((tensors, len(objects)))
        del objects
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    memory = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    files = len(os.listdir("/proc/self/fd")) - 1  # without the one of the listing
    threads = len(os.listdir("/proc/self/task"))
    fewest = map(min, zip(*counts, strict=True))
    return Footprint(step, life, trained, memory, files, threads, *fewest)


def complaints(taken: Sequence[Footprint], steps: int) -> Iterator[str]:
    """What has grown in a run of so many steps; its first quarter is the warm-up."""
    some = [each for each in taken if not each.life and each.step >= steps / 4]
    if steps >= STEPS_FOR_MEMORY:
        before = max(each.memory for each in some if each.step <= steps / 2)
        growth = max(each.memory for each in some if each.step >= steps * 3 / 4) / before - 1
        if growth > MOST_GROWTH:
            yield f"memory grew by {growth:.2%}, which is more than {MOST_GROWTH:.0%}"
    for name in ("files", "threads", "tensors"):
        counts = {getattr(each, name): each.step for each in some}
        if len(counts) > 1:
            listed = ", ".join(f"{count} after step {step}" for count, step in counts.items())
            yield f"the number of {name} changed: {listed}"
    for life in dict.fromkeys(each.life for each in taken):
        first, *_, last = [each for each in taken if each.life == life] if life else some
        for name, few in _FEW.items():
            more = getattr(last, name) - getattr(first, name)
            # Buckets hold more when more is trained.
            if more > few + (last.step - first.step) / 10 and first.trained == last.trained:
                yield f"{more} more {name} after step {last.step} than after {first.step}"


def lives(seed: int, steps: int) -> Iterator[tuple[Program, int]]:
    """Programs that have this many steps together, and the number of steps of each."""
    draw = Random(seed)
    number, done = 0, 0
    while done < steps:
        length = max(_LONG, steps // 20) if number % _EVERY == 0 else draw.randint(8, 24)
        if steps - done - length < 5:  # a program of a step or two shows little
            length = steps - done
        kind = "usual" if number % 4 else "sharded"  # every second one of the long ones
        yield KINDS[kind](seed * 100_000 + number, RANKS, length), length
        number, done = number + 1, done + length


class Soak:
    """Wrappers, one after the other, on this rank.

    Args:
        after_step: called after each step.

    Attributes:
        taken: footprints.
        farthest: the largest distance from a tensor of the oracle, as a share of the bound.
        lives, steps: their numbers so far.
        grown: what has grown, on any rank.
    """

    def __init__(self, after_step: Callable[[Soak], object]) -> None:
        self._after_step = after_step
        self.taken: list[Footprint] = []
        self.lives = self.steps = 0
        self.farthest = 0.0
        self.grown: list[str] = []

    def play(self, program: Program, steps: int) -> None:
        """Play a program, and judge each step."""
        self.lives += 1
        judge, end, measured = Judge(program, OURS), self.steps + steps, _measured(program, steps)

        def after(player: Player, number: int) -> None:
            is_end = number == len(program.actions)
            is_step = not is_end and isinstance(program.actions[number], Step)
            # Inside join() the ranks take different numbers of steps.
            if is_end or (is_step and not program.counts):
                self._judge(judge, program, player, number + 1)
            if number in measured:
                player.outputs.clear()
                judge.drop_outputs()
                trained = sum(param.requires_grad for param in player.params)
                self.taken.append(footprint(self.steps, self.lives, trained))
            if is_step:
                self.steps += 1
                self._after_step(self)

        with configured(program.seed, program.thresholds):
            play(program, OURS, DistributedDataParallel, program.options, after)
        self.farthest = max(self.farthest, judge.farthest)
        self.steps = end  # also those for which this rank had no inputs

    def _judge(self, judge: Judge, program: Program, player: Player, end: int) -> None:
        traces, player.trace = gather(player.trace), []
        found = next(judge.differences(traces, end), None)
        if found is not None:
            head, *actions = str(program).split("\n  ")
            shown = "\n  ".join([head, "...", *actions[:end][-_SHOWN:]])
            raise Failed(f"step {self.steps}, wrapper {self.lives}: {found}\n{shown}")

    def __str__(self) -> str:
        """The figures of this rank."""
        last = self.taken[-1]
        return (
            f"{self.lives} wrappers; memory: {last.memory / 2**20:.1f} MiB, files: "
            f"{last.files}, threads: {last.threads}, tensors: {last.tensors}, objects: "
            f"{last.objects}; tensors are at most {self.farthest:.2f} times as far from the oracle "
            "as rounding allows"
        )


def _measured(program: Program, steps: int) -> set[int]:
    """Numbers of the actions after which a long life is measured."""
    # After a step that drops the gradients: no backward of an earlier forward is left.
    pairs = zip(program.actions, program.actions[1:], strict=False)
    bare = [n for n, each in enumerate(pairs, 1) if each == (Step(), ZeroGrad(True, False))]
    later = [n for n in bare if program.actions[:n].count(Step()) >= steps // 2]
    return {later[0], later[-1]} if steps >= _LONG and len(later) > 1 else set()


def soak(seed: int, steps: int, after_step: Callable[[Soak], object] = lambda _: None) -> Soak:
    """Play the :func:`lives` of ``seed`` on this rank, one of two.

    Raises:
        Failed: a rank has seen something else than the oracle, or than the other.
    """
    # Make first what any program makes only once.
    groups.clear()
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8")
    ddp(torch.ones(1, 64)).sum().backward()
    del ddp
    gc.collect()
    gc.freeze()  # measurements do not look at torch
    found = Soak(after_step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program, length in lives(seed, steps):
            found.play(program, length)
            found.taken.append(footprint(found.steps))
    grown = [f"rank {dist.get_rank()}: {each}" for each in complaints(found.taken, steps)]
    found.grown = [each for rank in gather(grown) for each in rank]
    return found


def main(seed: int, steps: int) -> int:
    """Play in two processes, and print what was found; return an exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="tritonddp-soak-") as folder:
        try:
            torch.multiprocessing.spawn(_run_rank, (seed, steps, f"{folder}/store"), RANKS)
        except torch.multiprocessing.ProcessExitedException as failure:
            return failure.exit_code
    return 0


def _run_rank(rank: int, seed: int, steps: int, store: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("tritonddp").setLevel(logging.ERROR)  # backwards fail on purpose
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    start = time.monotonic()

    def progress(found: Soak) -> None:
        if rank == 0 and found.steps % 500 == 0:
            taken = time.monotonic() - start
            print(f"step {found.steps} of {steps}, {taken:.0f} s", flush=True)

    again = f"again: python tests/differential/run.py --seed {seed} --steps {steps}"
    try:
        found = soak(seed, steps, progress)
    except (Exception, Failed):
        failure = f"\nsoak failed on rank {rank}: {traceback.format_exc()}{again}"
        print(failure, file=sys.stderr, flush=True)
        sys.exit(1)
    if rank == 0:
        print(f"seed {seed}: {steps} steps in {time.monotonic() - start:.0f} s, {found}")
        print("\n".join([*found.grown, again] if found.grown else []), flush=True)
    dist.destroy_process_group()
    sys.exit(int(bool(found.grown)))
