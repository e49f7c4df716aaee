"""The process group of a benchmark that runs under torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    share_device: bool = False  # several ranks take turns on one GPU, so that times say little

    def barrier(self) -> None:
        """Wait for the other ranks, and for this device to be idle."""
        if self.backend == "nccl":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.synchronize()

    def timed(self, call: Callable[[], object]) -> float:
        """Seconds of a call, from a barrier until this rank's device is idle; collective."""
        self.barrier()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def agreed(self, answer: bool) -> bool:
        """What rank 0 answers; collective."""
        answers = torch.tensor(answer, device=self.device)
        dist.broadcast(answers, src=0)
        return bool(answers)

    def gathered(self, found: Any) -> list[Any]:
        """What each rank has found; collective."""
        everybody: list[Any] = [None] * self.world_size
        dist.all_gather_object(everybody, found)
        return everybody

    def slowest(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        """Rounds of this rank by name, and those of all: a round takes as long as its slowest rank.

        Collective.
        """
        everybody = self.gathered(seconds)
        return {
            name: [max(each) for each in zip(*(one[name] for one in everybody), strict=True)]
            for name in seconds
        }

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def on_one_card(host: str) -> dict[str, str]:
    """Environment variables of a rank that shares its card; ``host`` is unique to it.

    NCCL refuses two ranks of one host on one device. It takes ranks with different ``NCCL_HOSTID``
    for different hosts, which talk through sockets.
    """
    return {
        "NCCL_HOSTID": host,
        "NCCL_DEBUG": "WARN",
        # From 2.30 on NCCL compares cards, whatever the host; earlier ones do not know this.
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        # Few blocks, one algorithm: a rank's kernels must be able to run while others wait.
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_MAX_CTAS": "2",
    }


@contextmanager
def process_group(backend: str | None) -> Iterator[Ranks]:
    """Join the ranks that torchrun started; leave them at the end.

    Args:
        backend: ``"nccl"`` puts models on CUDA devices, any other on the CPU. ``None``: NCCL where
            torch sees a CUDA device, else gloo. CPU ranks get one thread each.
    """
    if "RANK" not in os.environ:
        raise SystemExit(
            "start this with torchrun: torchrun --standalone --nproc-per-node 2 <script>"
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    share_device = False
    if backend == "nccl":
        cards = torch.cuda.device_count()
        share_device = int(os.environ["LOCAL_WORLD_SIZE"]) > cards
        if share_device:
            for name, value in on_one_card(f"rank{rank}").items():
                os.environ.setdefault(name, value)
        device = torch.device("cuda", local_rank % cards)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    ranks = Ranks(rank, dist.get_world_size(), device, backend, share_device)
    try:
        yield ranks
        # The last collective is one without tensors of Python's: a thread of gloo's that lets go of
        # such a tensor while the interpreter ends aborts the process (pytorch/pytorch#190489).
        ranks.barrier()
    finally:
        dist.destroy_process_group()
