"""What a process holds, and whether that grows."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# Memory may grow by this share between the second quarter of a run and the last.
MOST_GROWTH = 0.01
# So many steps have a last quarter that is long enough to say something of memory.
STEPS_FOR_MEMORY = 2000
# Python keeps some objects for a while, whatever a step does; what is kept of each step is more.
_FEW_OBJECTS = 500
_FEW_TENSORS = 15


@dataclass(frozen=True)
class Footprint:
    """What a process holds at one time.

    Attributes:
        tensors, objects: that Python's garbage collector knows.
    """

    step: int  # of the soak, after which it was taken
    life: int | None  # number of the wrapper that was there; None between two
    trained: int  # how many of its parameters have gradients; 0 between two
    memory: int  # bytes of private pages, after what is free has been given back
    files: int  # open file descriptors
    threads: int  # of the process
    tensors: int
    objects: int

    @classmethod
    def now(cls, step: int, life: int | None = None, trained: int = 0) -> Footprint:
        """Measure (takes some 0.2 s)."""
        counts = []
        for _ in range(3):
            time.sleep(0.02)  # gloo's threads let go of what they have sent when they get to it
            gc.collect()
            objects = gc.get_objects()
            tensors = sum(1 for each in objects if issubclass(type(each), torch.Tensor))
            counts.append((tensors, len(objects)))
            del objects
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)
        files = len(os.listdir("/proc/self/fd")) - 1  # that of the listing
        threads = len(os.listdir("/proc/self/task"))
        return cls(
            *(step, life, trained, _private_bytes(), files, threads),
            *map(min, zip(*counts, strict=True)),
        )


_libc = ctypes.CDLL(None)


def _private_bytes() -> int:
    """As the kernel sums them up, without what is shared with other processes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def growth_of_memory(taken: Sequence[Footprint], steps: int) -> float:
    """The most memory in the last quarter of a run by the most in its second, less one."""
    second, last = (
        max(each.memory for each in taken if begin * steps <= each.step <= end * steps)
        for begin, end in ((0.25, 0.5), (0.75, 1.0))
    )
    return last / second - 1


def complaints(taken: Sequence[Footprint], warm_up: int, steps: int) -> list[str]:
    """What has grown in a run of so many steps, of which the first few are to warm up."""
    warm = [each for each in taken if each.step >= warm_up]
    found = []
    if steps >= STEPS_FOR_MEMORY:
        growth = growth_of_memory(taken, steps)
        if growth > MOST_GROWTH:
            found.append(f"memory grew by {growth:.2%}, which is more than {MOST_GROWTH:.0%}")
    between = [each for each in warm if each.life is None]
    pairs = [("between wrappers", between[0], between[-1])]
    # (A wrapper may have files of its own.)
    unchanging = [(name, between) for name in ("files", "threads", "tensors")]
    for life in dict.fromkeys(each.life for each in taken if each.life is not None):
        within = [each for each in taken if each.life == life]
        unchanging += [(name, within) for name in ("files", "threads")]
        # Buckets hold more when more is trained.
        if within[0].trained == within[-1].trained:
            pairs.append((f"within wrapper {life}", within[0], within[-1]))
    for name, each in unchanging:
        counts = {getattr(footprint, name): footprint.step for footprint in each}
        if len(counts) > 1:
            told = ", ".join(f"{count} after step {step}" for count, step in counts.items())
            outlive = " that outlive a wrapper" if each is between else ""
            found.append(f"the number of {name}{outlive} changed: {told}")
    for where, first, last in pairs:
        passed = last.step - first.step
        for name, few in (("tensors", _FEW_TENSORS), ("objects", _FEW_OBJECTS)):
            more = getattr(last, name) - getattr(first, name)
            if more > few + passed / 10:
                found.append(
                    f"{more} more {name} {where} after step {last.step} than after {first.step}"
                )
    return found
