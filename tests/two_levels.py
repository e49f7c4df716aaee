"""Twins of quantized sums between hosts of several ranks, for recorded and for real GPUs."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from distributed import gather
from modules import Given
from quantized_ranks import all_reduce, quantized_buffers
from torch import Tensor
from training import drawn

from tritonddp import DistributedDataParallel

SHAPES = [(64, 80), (640,), (70, 33), (300,), (64, 64), (1, 5), (345, 3)]


def given(rank: int, step: int) -> list[Tensor | None]:
    """Zeros in the first step, which leave no residual; in odd steps some are missing."""
    if not step:
        return [torch.zeros(shape) for shape in SHAPES]
    left_out = ({4, 2}, {4}, {4, 0}, {4})[rank % 4] if step % 2 else {}  # number 4 on no rank
    grads = [drawn(*shape, step=10 * step + n, rank=rank) for n, shape in enumerate(SHAPES)]
    return [None if n in left_out else grad for n, grad in enumerate(grads)]


class Twins:
    """Hosts of ``size`` ranks each in one process: sums within a host, then quantized messages.

    Blocks are those of a parameter. It makes no difference which rank owns which share.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._size, self._dtype = size, dtype
        hosts = dist.get_world_size() // size
        likes = [torch.empty(shape) for shape in SHAPES]
        self._flats = [
            quantized_buffers([like], [like.dim() > 1 and like.numel() >= 1024], hosts)
            for like in likes
        ]

    def reduce(self, of_ranks: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        means: list[Tensor | None] = []
        for flats, grads in zip(self._flats, zip(*of_ranks, strict=True), strict=True):
            sums = [
                self._sum(grads[at : at + self._size]) for at in range(0, len(grads), self._size)
            ]
            used = [[each is not None] for (each,) in sums]
            (mean,) = all_reduce(flats, sums, used)[0]
            is_used = any(flag for (flag,) in used)
            means.append(mean.to(self._dtype).float() if is_used else None)
        return means

    def _sum(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        scale = 1 / dist.get_world_size()
        there = [(each * scale).to(self._dtype) for each in grads if each is not None]
        return [sum(there[1:], there[0]).float() if there else None]


def replayed(device: torch.device) -> tuple[Tensor, Tensor]:
    """One step, and four replays of another one; on four ranks.

    Returns:
        The differences from means in fp32, and the sum of the residuals of all ranks.
    """
    shape = (48, 40)
    due = torch.zeros(shape, dtype=torch.float64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ddp = DistributedDataParallel(Given(shape).to(device), compression="int8")
        x = drawn(*shape).to(device)
        mean = torch.stack(gather(drawn(*shape))).double().mean(0)

        def count() -> None:
            due.add_(mean - ddp.module.params[0].grad.cpu().double())

        ddp(x).backward()
        count()
        ddp.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ddp(x).backward()
        for _ in range(4):
            graph.replay()
            count()
        of_ranks = gather(residuals_of(ddp))
    torch.cuda.current_stream().wait_stream(side)
    return due, torch.stack([each for kept in of_ranks for each in kept]).sum(0)


def residuals_of(ddp: Any) -> list[Tensor]:
    """Of gradients and of sums."""
    state = ddp.comm_state_dict()
    kept = [*state["sent"].values(), *state["reduced"].values()]
    return [each.cpu().double() for each in kept]
