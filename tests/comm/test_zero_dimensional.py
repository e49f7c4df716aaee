"""Factors on a GPU are not rounded to the dtype of the gradients that they multiply."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import Given
from recording.device import recording
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from training import WAYS

from tritonddp import DistributedDataParallel

SHAPES = [(40, 30), (17,), ()]


def play(ddp: Any, dtype: torch.dtype) -> None:
    """Reduce in every way that has a factor."""
    rank = dist.get_rank()

    def backward() -> None:
        loss = ddp(*(torch.randn(shape, dtype=dtype).to("cuda") for shape in SHAPES))
        (loss.real if loss.is_complex() else loss).backward()

    def train(*contexts: AbstractContextManager[Any], set_to_none: bool = False) -> None:
        ddp.zero_grad(set_to_none=set_to_none)
        for context in contexts:
            with context:
                backward()

    train(nullcontext())
    train(ddp.weighted(3 + 2 * rank))
    train(ddp.weighted(3 + 2 * rank, reduction="sum"), set_to_none=True)
    for reduction in ("mean", "sum"):
        with ddp.no_sync():
            train(ddp.weighted(7, reduction=reduction), ddp.weighted(2, reduction=reduction))
        with ddp.weighted(3 + rank, reduction=reduction):
            backward()
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + 2 * rank):
            train(nullcontext())
    with ddp.no_sync():
        train(nullcontext())
    ddp.reduce_gradients()


@pytest.mark.parametrize(
    "way", ["copies", "hook", "bf16 views", pytest.param("int8", marks=pytest.mark.quick)]
)
@ranks(2, interprets=True)
def test_no_operand_without_dimensions_loses_precision(way: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        options = {} if way == "hook" else {**WAYS[way], "check_finite": "raise"}
        with recording() as recorder:
            module = Given(*SHAPES, dtype=dtype).to("cuda")
            ddp = DistributedDataParallel(module, bucket_cap_mb=0.001, **options)
            if way == "hook":
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
            play(ddp, dtype)
        assert recorder.rounded == [], dtype
