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
    """This process's rank in the process group."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    share_device: bool = False  # several ranks take turns on one GPU, so their times mean little

    def barrier(self) -> None:
        """Wait until all ranks are here and this device is idle."""
        if self.backend == "nccl":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.synchronize()

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call, from a barrier until the device is idle; collective."""
        self.barrier()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def agreed(self, answer: bool) -> bool:
        """Return rank 0's answer; collective."""
        answers = torch.tensor(answer, device=self.device)
        dist.broadcast(answers, src=0)
        return bool(answers)

    def gathered(self, found: Any) -> list[Any]:
        """Return the values of all ranks; collective."""
        everybody: list[Any] = [None] * self.world_size
        dist.all_gather_object(everybody, found)
        return everybody

    def slowest(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        """Return the times of the slowest rank in each round, by name; collective.

        ``seconds`` are the rounds of this rank.
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
    """Return environment variables for a rank that shares its GPU; ``host`` is unique to the rank.

    NCCL rejects two ranks of one host on the same device. It treats ranks with different
    ``NCCL_HOSTID`` as ranks of different hosts, which communicate through sockets.
    """
    return {
        "NCCL_HOSTID": host,
        "NCCL_DEBUG": "WARN",
        # From version 2.30 on, NCCL compares devices across hosts; earlier versions ignore this.
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        # Few blocks and one algorithm: a rank's kernels must be able to run while others wait.
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_MAX_CTAS": "2",
    }


@contextmanager
def process_group(backend: str | None) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, and leave the group at the end.

    Args:
        backend: ``"nccl"`` puts models on CUDA devices, other backends on the CPU. ``None`` selects
            NCCL if torch sees a CUDA device, otherwise gloo. CPU ranks get one thread each.
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
        # End with a collective without Python tensors: if a gloo thread releases such a tensor
        # while the interpreter exits, the process aborts (pytorch/pytorch#190489).
        ranks.barrier()
    finally:
        dist.destroy_process_group()
