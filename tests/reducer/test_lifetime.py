"""Wrappers, reducers, buckets, hooks and graphs are freed."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import assert_same_bits, ranks
from hooked import power_sgd
from modules import mlp
from torch import Tensor, nn
from training import breaking_off, drawn, gradients, train_step, wrap

from tritonddp import DistributedDataParallel


def layers(width: int = 4) -> nn.Sequential:
    return mlp(4, width, width, 2)


def train(ddp: nn.Module, steps: int) -> Tensor | None:
    """Returns the last outputs."""
    outputs = None
    for number in range(steps):
        outputs = train_step(ddp, drawn(3, 4, step=number))
    return outputs


@pytest.mark.parametrize("steps", [0, 1, 3])
@ranks(2, views=True)
def test_reducer_buckets_and_hooks_are_freed_with_the_wrapper(
    rank: int, steps: int, view: bool
) -> None:
    model = layers()
    ddp = wrap(model, view)
    output = train(ddp, steps)
    buckets, core = ddp.reducer.buckets, ddp._ddp_state.core
    assert all(param._post_accumulate_grad_hooks for param in model.parameters())
    things = [ddp, core, ddp.reducer, *buckets, *(each.flat for each in buckets)]
    references = [weakref.ref(thing) for thing in things]
    model.zero_grad()
    del ddp, buckets, core, things
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert steps == 0 or output is not None  # an output does not keep the wrapper alive
    for param in model.parameters():
        assert not param._backward_hooks
        assert not getattr(param, "_post_accumulate_grad_hooks", None)
    # A collective would hang here: only this rank runs a backward of the module.
    if rank == 0:
        train(model, 1)


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


@ranks(2, views=True)
def test_a_backward_is_local_if_the_wrapper_is_dropped_before_it(view: bool) -> None:
    model = layers()
    ddp = wrap(model, view)
    train(ddp, 1)
    alone = copy.deepcopy(model)
    model.zero_grad()
    loss = ddp(drawn(3, 4)).square().sum()
    del ddp
    gc.collect()
    loss.backward()
    train_step(alone, drawn(3, 4))
    assert_same_bits(gradients(model), gradients(alone), "local gradient")


@ranks(2)
def test_tensors_that_outlive_the_forward_collect_no_hooks() -> None:
    class Passes(nn.Linear):
        """Returns a tensor that outlives the forward."""

        def forward(self, x: Tensor, kept: Tensor) -> Any:
            return super().forward(x), kept, self.weight, x

    ddp = DistributedDataParallel(Passes(4, 4))
    leaf = torch.ones(3, requires_grad=True)
    kept = leaf * 2
    x = drawn(3, 4)
    for _ in range(10):
        output, *_ = ddp(x, kept)
        (output.sum() + kept.sum() * 0).backward(retain_graph=True)
    assert len(kept._backward_hooks or {}) <= 1
    assert not leaf._backward_hooks
    assert not x._backward_hooks
    assert not ddp.module.weight._backward_hooks
    assert ddp.reducer.counters.reductions == 10


@ranks(2)
def test_a_backward_with_unused_parameters_frees_its_graph() -> None:
    ddp = wrap(nn.ModuleList([layers(), layers()]))
    ddp.module.forward = lambda number, x: ddp.module[number](x)  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        for number in (0, 1, 0, 1, 0):
            loss = ddp(number, drawn(3, 4)).sum()
            loss.backward()
            root = weakref.ref(loss)
            del loss
            assert root() is None
    finally:
        gc.enable()
