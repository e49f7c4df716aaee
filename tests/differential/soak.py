"""Programs with thousands of steps, compared with the oracle: does memory grow?

``python tests/differential/run.py --steps 10000`` plays them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from distributed import gather, run_ranks
from torch import nn

from differential.actions.training import Step
from differential.comparison import Judge
from differential.in_ranks import OURS, configured, play
from differential.kinds import usual
from differential.player import Player
from differential.program import Program
from tritonddp import DistributedDataParallel

RANKS = 2
_HOURS = 4.0  # that a soak may take
# Between the second and the last quarter of a run, which has at least this many steps, memory may
# grow by this share.
STEPS_FOR_MEMORY, MOST_GROWTH = 2000, 0.01
# Python may keep this many more objects, and one more in ten steps.
_FEW_OBJECTS = 500


class Footprint(NamedTuple):
    """What a process holds after a number of steps."""

    step: int
    memory: int  # bytes of private pages
    files: int  # open file descriptors
    threads: int
    tensors: int  # known to the garbage collector
    objects: int  # known to the garbage collector


def footprint(step: int) -> Footprint:
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
    return Footprint(step, memory, files, threads, *map(min, zip(*counts, strict=True)))


def complaints(taken: Sequence[Footprint], steps: int) -> Iterator[str]:
    """What has grown in a run of so many steps; its first quarter is the warm-up."""
    taken = [each for each in taken if each.step >= steps / 4]
    if steps >= STEPS_FOR_MEMORY:
        before = max(each.memory for each in taken if each.step <= steps / 2)
        growth = max(each.memory for each in taken if each.step >= steps * 3 / 4) / before - 1
        if growth > MOST_GROWTH:
            yield f"memory grew by {growth:.2%}, which is more than {MOST_GROWTH:.0%}"
    for name in ("files", "threads", "tensors"):
        counts = {getattr(each, name): each.step for each in taken}
        if len(counts) > 1:
            listed = ", ".join(f"{count} after step {step}" for count, step in counts.items())
            yield f"the number of {name} changed: {listed}"
    first, *_, last = taken
    more = last.objects - first.objects
    if more > _FEW_OBJECTS + (last.step - first.step) / 10:
        yield f"{more} more objects after step {last.step} than after {first.step}"


def programs(seed: int, steps: int) -> Iterator[tuple[Program, int]]:
    """Programs that have this many steps together, and the number of steps of each."""
    draw = Random(seed)
    number = done = 0
    while done < steps:
        length = draw.randint(8, 24)
        if steps - done - length < 5:  # a program of a step or two shows little
            length = steps - done
        yield usual.draw(seed * 100_000 + number, RANKS, length), length
        number, done = number + 1, done + length


def play_and_judge(program: Program) -> None:
    """Play a program on this rank, and compare each step with the oracle."""
    judge = Judge(program, OURS)

    def after(player: Player, number: int) -> None:
        is_end = number == len(program.actions)
        # Inside join() the ranks take different numbers of steps.
        if is_end or (program.actions[number] == Step() and not program.counts):
            traces, player.trace = gather(player.trace), []
            found = next(judge.differences(traces, number + 1), None)
            assert found is None, f"{found}\n{program}"

    with configured(program.seed, program.thresholds):
        play(program, OURS, DistributedDataParallel, program.options, after)


def soak(seed: int, steps: int) -> list[str]:
    """Play the :func:`programs` of ``seed`` on this rank, and return what has grown.

    Raises:
        RuntimeError: the ranks have seen something else than the oracle, or than each other.
    """
    logging.getLogger("tritonddp").setLevel(logging.ERROR)  # backwards fail on purpose
    # Make first what any program makes only once.
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8")
    ddp(torch.ones(1, 64)).sum().backward()
    del ddp
    gc.collect()
    gc.freeze()  # measurements do not look at torch
    taken: list[Footprint] = []
    done = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program, length in programs(seed, steps):
            play_and_judge(program)
            done += length
            taken.append(footprint(done))
    return [f"rank {dist.get_rank()}: {each}" for each in complaints(taken, steps)]


def main(seed: int, steps: int) -> int:
    """Play in two processes, and print what was found; return an exit status."""
    start = time.monotonic()
    try:
        found = run_ranks(soak, RANKS, seed, steps, timeout=_HOURS * 3600)
        grown = [each for of_rank in found for each in of_rank]
    except pytest.fail.Exception as failed:
        grown = [str(failed)]
    print("\n".join([*grown, f"{steps} steps in {time.monotonic() - start:.0f} s"]))
    return int(bool(grown))
