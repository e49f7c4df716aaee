"""Objects of the package are freed."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
from distributed import ranks
from hooked import power_sgd
from modules import mlp
from training import breaking_off, drawn, train_step

from tritonddp import DistributedDataParallel


def train(ddp: DistributedDataParallel, steps: int) -> None:
    for number in range(steps):
        train_step(ddp, drawn(3, 4, step=number))


def joined(ddp: DistributedDataParallel) -> None:
    with ddp.join():
        train(ddp, 1)


def broken(ddp: DistributedDataParallel) -> None:
    with breaking_off(ddp.module[2].weight):
        train(ddp, 1)


USES: dict[str, tuple[dict[str, Any], Callable[[DistributedDataParallel], object]]] = {
    "plain": ({}, lambda ddp: None),
    "views": ({"gradient_as_bucket_view": True}, lambda ddp: None),
    "int8": ({"compression": "int8"}, lambda ddp: None),
    "hook": ({}, power_sgd),
    "join": ({}, joined),
    "copy": ({}, copy.deepcopy),
    "broken": ({}, broken),
}


@pytest.mark.parametrize("use", USES)
@ranks(2)
def test_a_dropped_wrapper_is_freed_without_the_garbage_collector(use: str) -> None:
    """Otherwise it keeps a destroyed process group alive until the next collection."""
    options, act = USES[use]

    def trained() -> None:
        ddp = DistributedDataParallel(mlp(4, 64, 64, 2), **options)
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
