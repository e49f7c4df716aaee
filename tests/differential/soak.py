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

from differential.comparison import judged
from differential.in_ranks import configured, play
from differential.kinds import usual
from differential.program import Program
from differential.wrappers import OURS
from tritonddp import DistributedDataParallel

# Memory may grow by this share between the second and the last quarter of a run, if the run has at
# least this many steps.
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
    """What is larger in the last quarter of a run than in its second; the first is the warm-up."""
    before = [each for each in taken if steps / 4 <= each.step <= steps / 2]
    after = [each for each in taken if each.step >= steps * 3 / 4]
    for name in Footprint._fields[1:]:
        first, last = (max(getattr(each, name) for each in part) for part in (before, after))
        allowed = {"memory": first * MOST_GROWTH, "objects": _FEW_OBJECTS + steps / 10}
        if last - first > allowed.get(name, 0) and (name != "memory" or steps >= STEPS_FOR_MEMORY):
            yield f"{name} grew from {first} to {last} in {steps} steps"


def programs(seed: int, steps: int) -> Iterator[tuple[Program, int]]:
    """Programs that have this many steps together, and the number of steps of each."""
    draw = Random(seed)
    number = done = 0
    while done < steps:
        length = draw.randint(8, 24)
        if steps - done - length < 5:  # a program of a step or two shows little
            length = steps - done
        yield usual.draw(seed * 100_000 + number, 2, length), length
        number, done = number + 1, done + length


def play_and_judge(program: Program) -> None:
    """Play a program on this rank, and compare each action with the oracle."""
    with configured(program.seed, program.thresholds):
        traces = gather(play(program, OURS, DistributedDataParallel))
    found = next(judged(program, OURS, traces), "")
    assert not found, f"{found}\n{program}"


def soak(seed: int, steps: int) -> list[str]:
    """Play the :func:`programs` of ``seed`` on this rank, and return what has grown.

    Raises:
        AssertionError: the ranks have seen something else than the oracle, or than each other.
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
        found = run_ranks(soak, 2, seed, steps, timeout=4 * 3600)
        grown = [each for of_rank in found for each in of_rank]
    except pytest.fail.Exception as failed:
        grown = [str(failed)]
    print("\n".join([*grown, f"{steps} steps in {time.monotonic() - start:.0f} s"]))
    return int(bool(grown))
