"""Wrappers, reducers, buckets, hooks and graphs are freed."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import ranks
from hooked import power_sgd
from modules import mlp
from torch import Tensor, nn
from training import breaking_off, drawn, train_step

from tritonddp import DistributedDataParallel


def layers(width: int = 4) -> nn.Sequential:
    return mlp(4, width, width, 2)


def train(ddp: nn.Module, steps: int) -> Tensor | None:
    """Returns the last outputs."""
    outputs = None
    for number in range(steps):
        outputs = train_step(ddp, drawn(3, 4, step=number))
    return outputs


def joined(ddp: DistributedDataParallel) -> None:
    with ddp.join():
        train(ddp, 1)


def weighted(ddp: DistributedDataParallel) -> None:
    with ddp.no_sync():
        train(ddp, 1)
    with ddp.weighted(3):
        train(ddp, 1)


def broken(ddp: DistributedDataParallel) -> None:
    with breaking_off(ddp.module[2].weight):
        train(ddp, 1)


def refused(ddp: DistributedDataParallel) -> None:
    with pytest.raises(TypeError, match="comm_state_dict"):
        ddp.load_comm_state_dict({"odd": 1})


USES: dict[str, tuple[dict[str, Any], Callable[[DistributedDataParallel], object]]] = {
    "plain": ({}, lambda ddp: None),
    "views": ({"gradient_as_bucket_view": True}, lambda ddp: None),
    "static graph": ({"static_graph": True}, lambda ddp: None),
    "int8": ({"compression": "int8"}, lambda ddp: None),
    "bfloat16": ({"reduce_dtype": torch.bfloat16}, lambda ddp: None),
    "check_finite": ({"check_finite": "raise"}, DistributedDataParallel.check_sync),
    "hook": ({}, power_sgd),
    "join": ({}, joined),
    "weighted": ({}, weighted),
    "requests": ({}, DistributedDataParallel.reduce_gradients),
    "copy": ({}, copy.deepcopy),
    "broken": ({}, broken),
    "refused state": ({}, refused),
}


@pytest.mark.parametrize("use", USES)
@ranks(2)
def test_a_dropped_wrapper_is_freed_without_the_garbage_collector(use: str) -> None:
    """Otherwise it keeps a destroyed process group alive until the next collection."""
    options, act = USES[use]

    def trained() -> None:
        ddp = DistributedDataParallel(layers(64), **options)  # wide enough to be quantized
        act(ddp)
        if use != "join":  # the next backward would free its garbage
            train(ddp, 3)

    trained()  # imports make cycles
    gc.collect()
    gc.disable()
    try:
        trained()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [
            f"{type(each).__name__} {getattr(each, '__module__', '')} {each!r:.80}"
            for each in gc.garbage
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    kept = [each for each in found if "tritonddp" in each or "ProcessGroup" in each]
    assert not kept, kept
