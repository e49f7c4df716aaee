"""What one steady step of a wrapped model calls in the package: functions and files, counted.

Run it to see them: ``python tests/steady_step.py`` (two ranks over gloo, on this machine).
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tritonddp
from tritonddp import DistributedDataParallel

LIBRARY = str(Path(tritonddp.__file__).parent)
# Until then order, buckets and wires are chosen, and steps are measured for the logging data.
WARM_UP = 12


class Vectors(nn.Module):
    """Parameters whose gradients come one after the other, at next to no cost."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for vector in self.vectors:
            x = x * vector
        return x.sum()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Context: what runs inside is none of the package's work."""
    note = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(note)


def calls(function: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Calls of functions of the package on this thread, by file and name."""
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY):
            name = getattr(code, "co_qualname", code.co_name)  # of Python 3.11
            found[code.co_filename[len(LIBRARY) + 1 :], name] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def steady_step(
    count: int, buckets: int, size: int, is_local: bool = False, **options: Any
) -> Counter[tuple[str, str]]:
    """What a step of ``count`` parameters in so many buckets calls; on all ranks at once.

    Args:
        size: elements of a parameter.
        is_local: the step runs under ``no_sync``.
        options: of the wrapper.
    """
    cap = size * 4 * count / buckets / 2**20
    ddp = DistributedDataParallel(Vectors(count, size), bucket_cap_mb=cap, **options)
    inputs = torch.ones(size)

    def step() -> None:
        with ddp.no_sync() if is_local else contextlib.nullcontext():
            ddp(inputs).backward()

    for _ in range(WARM_UP):
        ddp.zero_grad()
        ddp(inputs).backward()
    assert len(ddp.reducer.buckets) == buckets
    if is_local:
        step()
    ddp.zero_grad()
    return calls(step)


def main(rank: int, port: int) -> None:
    """Print what is called, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = steady_step(16, 2, 64)
    if rank == 0:
        for (file, name), times in sorted(found.items()):
            print(f"{times:4}  {file:28} {name}")
        files = {file for file, _ in found}
        print(
            f"{found.total()} calls of {len(found)} functions in {len(files)} files: a step of 16 "
            "gradients in 2 buckets"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    torch.multiprocessing.spawn(main, (chosen,), 2)
