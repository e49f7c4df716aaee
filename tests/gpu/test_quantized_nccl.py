"""Quantised gradients over NCCL: the bits that the twins on the CPU make of the same gradients."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import assert_same_bits
from torch import Tensor, nn
from worlds import CPU, NCCL_2, in_worlds

from tritonddp import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from quantized_ranks import all_reduce, quantized_buffers

# Large and small, exact and quantised, with and without a last block that is not full.
LARGE = (64, 80) if "TRITON_INTERPRET" in os.environ else (512, 640)
SHAPES = [LARGE, (640,), (70, 33), (300,), (64, 64), (1, 5), (1025, 3)]


class Prescribed(nn.Module):
    """Parameters whose gradients are what the forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        used = zip(self.params, gradients, strict=True)
        return sum(((param * g).sum() for param, g in used if g is not None), torch.zeros(()))


def gradients(rank: int, step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    given: list[Tensor | None] = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if step % 2 == 1:
        given[4] = None  # on no rank
        if rank == 0:
            given[2] = None
    return given


@in_worlds(CPU, NCCL_2)
def test_gradients_have_the_bits_of_the_twins(device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(Prescribed().to(device), compression="int8", bucket_cap_mb=0.02)
    simulated = [
        quantized_buffers(
            [torch.empty(shape)],
            [len(shape) > 1 and torch.Size(shape).numel() >= 1024],
            size,
            is_direct=device.type == "cpu",  # of two ranks
        )
        for shape in SHAPES
    ]
    for step in range(4):
        ddp.zero_grad()
        given = [g if g is None else g.to(device) for g in gradients(rank, step)]
        ddp(given).backward()
        everyone = [gradients(each, step) for each in range(size)]
        for slot, (flats, param) in enumerate(zip(simulated, ddp.parameters(), strict=True)):
            theirs = [[each[slot]] for each in everyone]
            used = [[grad is not None] for (grad,) in theirs]
            ((mean,), *_) = all_reduce(flats, theirs, used, scale=1 / size)
            expected = mean if any(flag for (flag,) in used) else None
            grad = None if param.grad is None else param.grad.cpu()
            assert_same_bits(grad, expected, f"step {step}, slot {slot}")
    assert sum(bucket.quantization is not None for bucket in ddp.reducer.buckets) > 1
    assert not ddp._ddp_state.core.manager.has_moved, "residuals have moved between the ranks"
