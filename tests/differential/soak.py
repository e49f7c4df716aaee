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
from differential.in_ranks import OURS, arguments_of, configured, groups, play
from differential.kinds import KINDS
from differential.player import Player
from differential.program import Options, Program
from tritonddp import DistributedDataParallel

RANKS = 2
# A life, that is a wrapper with its program, is long now and then, so that growth within one shows.
# It is measured in the middle, after what the first steps make, and at its end; where no gradients
# are, whose number changes.
_EVERY = 6
LONG = 40
_WARM_UP = 3  # lives until all that is made once is there
_SHOWN = 30  # of the last actions are shown where the soak fails
_TIMEOUT = 60  # seconds that a rank waits for the other
_SAYS = 10  # seconds between two lines of progress
# Memory may grow by this share between the second quarter of a run and the last, which is long
# enough to say something in a run of so many steps.
MOST_GROWTH, STEPS_FOR_MEMORY = 0.01, 2000
# Python keeps some objects for a while, whatever a step does; what is kept of each step is more.
_FEW = {"tensors": 15, "objects": 500}


class Failed(BaseException):
    """The soak has found something: no error of what it plays."""


class Footprint(NamedTuple):
    """What a process holds at one time; Python's garbage collector knows tensors and objects."""

    step: int  # of the soak, after which it was taken
    life: int | None  # number of the wrapper that was there; None between two
    trained: int  # how many of its parameters have gradients; 0 between two
    memory: int  # bytes of private pages, after what is free has been given back
    files: int  # open file descriptors
    threads: int
    tensors: int
    objects: int


def footprint(step: int, life: int | None = None, trained: int = 0) -> Footprint:
    """Measure (takes some 0.2 s)."""
    counts = []
    for _ in range(3):
        time.sleep(0.02)  # threads of gloo release what they have sent when they get to it
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(1 for each in objects if issubclass(type(each), torch.Tensor))
        counts.append((tensors, len(objects)))
        del objects
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    memory = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    files = len(os.listdir("/proc/self/fd")) - 1  # without that of the listing
    threads = len(os.listdir("/proc/self/task"))
    return Footprint(
        *(step, life, trained, memory, files, threads), *map(min, zip(*counts, strict=True))
    )


def growth_of_memory(taken: Sequence[Footprint], steps: int) -> float:
    """The most memory in the last quarter of a run by the most in its second, less one."""
    second, last = (
        max(each.memory for each in taken if begin * steps <= each.step <= end * steps)
        for begin, end in ((0.25, 0.5), (0.75, 1.0))
    )
    return last / second - 1


def complaints(taken: Sequence[Footprint], warm_up: int, steps: int) -> Iterator[str]:
    """What has grown in a run of so many steps, of which the first few are to warm up."""
    if steps >= STEPS_FOR_MEMORY:
        growth = growth_of_memory(taken, steps)
        if growth > MOST_GROWTH:
            yield f"memory grew by {growth:.2%}, which is more than {MOST_GROWTH:.0%}"
    for life in dict.fromkeys(each.life for each in taken):
        some = [each for each in taken if each.life == life]
        if life is None:
            some = [each for each in some if each.step >= warm_up]
        where = "between wrappers" if life is None else f"within wrapper {life}"
        # A wrapper may have files of its own, and makes tensors.
        for name in ("files", "threads", *(["tensors"] if life is None else [])):
            counts = {getattr(each, name): each.step for each in some}
            if len(counts) > 1:
                listed = ", ".join(f"{count} after step {step}" for count, step in counts.items())
                yield f"the number of {name} {where} changed: {listed}"
        first, last = some[0], some[-1]
        if first.trained != last.trained:  # buckets hold more when more is trained
            continue
        for name, few in _FEW.items():
            more = getattr(last, name) - getattr(first, name)
            if more > few + (last.step - first.step) / 10:
                when = f"after step {last.step} than after {first.step}"
                yield f"{more} more {name} {where} {when}"


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
        after_step: called after each.

    Attributes:
        taken: footprints.
        farthest: how far a tensor was from the oracle's at most, by what rounding allows.
        lives, steps: how many there were.
        grown: what grew, on any rank.
    """

    def __init__(self, after_step: Callable[[Soak], object]) -> None:
        self._after_step = after_step
        self.taken: list[Footprint] = []
        self.lives = self.steps = 0
        self.farthest = 0.0
        self.grown: list[str] = []

    def live(self, program: Program, steps: int) -> None:
        self.lives += 1
        end = self.steps + steps
        self._play(program, steps)
        self.steps = end  # with those that this rank had no inputs for
        self.taken.append(footprint(end))

    def _play(self, program: Program, steps: int) -> None:
        """Each step is judged, and if it is a long life some are measured."""
        judge, measured = Judge(program, OURS), _measured(program, steps)

        def after(player: Player, number: int) -> None:
            is_end = number == len(program.actions)
            is_step = not is_end and isinstance(program.actions[number], Step)
            # Inside join() the ranks take different numbers of steps.
            if is_end or (is_step and not program.counts):
                self._judge(judge, program, player, number + 1)
            if number in measured:
                player.forget_outputs()
                judge.forget_outputs()
                trained = sum(param.requires_grad for param in player.net.parameters())
                self.taken.append(footprint(self.steps, self.lives, trained))
            if is_step:
                self.steps += 1
                self._after_step(self)

        with configured(program.seed, program.thresholds):
            play(program, OURS, DistributedDataParallel, program.options, after)
        self.farthest = max(self.farthest, judge.farthest)

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
            f"{STEPS_FOR_MEMORY} steps this says little); files: {last.files}, threads: "
            f"{last.threads}, tensors between wrappers: {last.tensors}, objects: {last.objects}; "
            f"tensors are at most {self.farthest:.2f} times as far from the oracle's as rounding "
            "allows"
        )


def _measured(program: Program, steps: int) -> set[int]:
    """Numbers of the actions after which a long life is measured."""
    # After a step that drops the gradients: no backward of an earlier forward is left.
    pairs = zip(program.actions, program.actions[1:], strict=False)
    bare = [n for n, each in enumerate(pairs, 1) if each == (Step(), ZeroGrad(True, False))]
    later = [n for n in bare if program.actions[:n].count(Step()) >= steps // 2]
    return {later[0], later[-1]} if steps >= LONG and later else set()


def soak(seed: int, steps: int, after_step: Callable[[Soak], object] = lambda _: None) -> Soak:
    """Play the :func:`lives` of ``seed`` on this rank, one of two.

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
    found, warm = Soak(after_step), 0
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
    torch.set_num_threads(1)
    logging.getLogger("tritonddp").setLevel(logging.ERROR)  # backwards break off on purpose
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    start = last = time.monotonic()

    def progress(found: Soak) -> None:
        nonlocal last
        if rank == 0 and time.monotonic() > last + _SAYS:
            last = time.monotonic()
            memory = f", {found.taken[-1].memory / 2**20:.1f} MiB" if found.taken else ""
            print(f"step {found.steps} of {steps}, {last - start:.0f} s{memory}", flush=True)

    # With fewer steps there are other wrappers.
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
