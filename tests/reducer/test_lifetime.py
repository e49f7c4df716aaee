"""Nothing outlives its use, and a backward that breaks off leaves no wrong gradient behind."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from hooked import power_sgd
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from tritonddp import DistributedDataParallel

WIDE = 64  # enough elements for what is quantised

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def layers(width: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


def batch(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


def wrap(module: nn.Module, view: bool, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, gradient_as_bucket_view=view, **options)


def step(net: nn.Module, seed: int) -> Tensor:
    net.zero_grad()
    output = net(batch(seed))
    output.pow(2).sum().backward()
    return output


def assert_right(ddp: nn.Module, alone: nn.Module, seed: int) -> None:
    """One more step gives the mean of the gradients of unwrapped models."""
    step(ddp, seed)
    step(alone, seed)
    for param, own in zip(ddp.parameters(), alone.parameters(), strict=True):
        expected = sum(gather(own.grad)) / dist.get_world_size()
        torch.testing.assert_close(param.grad, expected)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@VIEW
@pytest.mark.parametrize("steps", [0, 1, 3])
@ranks(2)
def test_dropping_the_wrapper_frees_it_its_reducer_and_its_buckets(steps: int, view: bool) -> None:
    model = layers()
    ddp = wrap(model, view)
    output = None
    for seed in range(steps):
        output = step(ddp, seed)
    things = [ddp, ddp._ddp_state.core, ddp.reducer, *ddp.reducer.buckets]
    references = [weakref.ref(thing) for thing in things]
    storages = [weakref.ref(bucket.flat) for bucket in ddp.reducer.buckets]
    model.zero_grad()
    del ddp, things
    gc.collect()
    assert [reference() for reference in [*references, *storages]] == [None] * (
        len(references) + len(storages)
    )
    assert steps == 0 or output is not None  # an output that lives on holds nothing of it


def joined(ddp: DistributedDataParallel) -> None:
    with ddp.join():
        step(ddp, 0)


def weighted(ddp: DistributedDataParallel) -> None:
    with ddp.no_sync():
        step(ddp, 0)
    with ddp.weighted(3):
        step(ddp, 1)


def broken(ddp: DistributedDataParallel) -> None:
    handle = break_off(ddp.module, 2, [0, 1])
    with pytest.raises(Broken):
        step(ddp, 0)
    handle.remove()


def refused(ddp: DistributedDataParallel) -> None:
    with pytest.raises(TypeError, match="comm_state_dict"):
        ddp.load_comm_state_dict({"odd": 1})


USES: dict[str, tuple[dict[str, Any], Callable[[DistributedDataParallel], object]]] = {
    "plain": ({}, lambda ddp: None),
    "views": ({"gradient_as_bucket_view": True}, lambda ddp: None),
    "static graph": ({"static_graph": True}, lambda ddp: None),
    "int8": ({"compression": "int8"}, lambda ddp: None),
    "auto": ({"compression": "auto"}, lambda ddp: None),
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
def test_a_dropped_wrapper_is_no_work_for_the_garbage_collector(use: str) -> None:
    """Or it would keep the process group, when that is destroyed, until the collector comes by."""
    options, act = USES[use]

    def trained() -> None:
        ddp = DistributedDataParallel(layers(WIDE), **options)
        act(ddp)
        for seed in range(3):
            step(ddp, seed)

    trained()  # what is imported on the way makes cycles
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


@VIEW
@ranks(2)
def test_dropping_the_wrapper_between_forward_and_backward_leaves_a_local_backward(
    view: bool,
) -> None:
    model = layers()
    alone = copy.deepcopy(model)
    ddp = wrap(model, view)
    alone.load_state_dict(model.state_dict())
    step(ddp, 0)
    model.zero_grad()
    loss = ddp(batch(1)).pow(2).sum()
    del ddp
    gc.collect()
    loss.backward()
    step(alone, 1)
    for param, own in zip(model.parameters(), alone.parameters(), strict=True):
        assert_same_bits(param.grad, own.grad, "local gradient")


@VIEW
@ranks(2)
def test_a_dropped_wrapper_leaves_no_hook_on_the_parameters(view: bool) -> None:
    model = layers()
    nodes = [get_gradient_edge(param).node for param in model.parameters()]
    ddp = wrap(model, view)
    for seed in range(3):
        step(ddp, seed)
    reducer = weakref.proxy(ddp._ddp_state.core)
    hooks = [weakref.ref(handle) for handle in ddp._ddp_state.core.tracker._handles]
    assert len(hooks) == len(nodes)
    del ddp
    gc.collect()
    with pytest.raises(ReferenceError):
        reducer.counters  # noqa: B018
    assert [hook() for hook in hooks] == [None] * len(hooks)
    for param in model.parameters():
        assert not param._backward_hooks
        assert not getattr(param, "_post_accumulate_grad_hooks", None)
    # A collective would hang here: this rank alone runs a backward of the bare model.
    if dist.get_rank() == 0:
        model(batch(7)).sum().backward()


@ranks(2)
def test_outputs_that_live_on_collect_no_hooks() -> None:
    class Passes(nn.Module):
        """Hands on a tensor that outlives the forward."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, kept: Tensor) -> tuple[Any, ...]:
            return self.linear(x), kept, self.linear.weight, x

    ddp = DistributedDataParallel(Passes())
    leaf = torch.ones(3, requires_grad=True)
    kept = leaf * 2
    x = batch(0)
    for _ in range(10):
        output, *_ = ddp(x, kept)
        (output.sum() + kept.sum() * 0).backward(retain_graph=True)
    assert len(kept._backward_hooks or {}) <= 1
    assert not leaf._backward_hooks
    assert not x._backward_hooks
    assert not ddp.module.linear.weight._backward_hooks
    assert ddp.reducer.counters.reductions == 10


@VIEW
@ranks(2)
def test_accumulated_gradients_are_freed_by_zero_grad(view: bool) -> None:
    ddp = wrap(layers(), view)
    for seed in range(3):
        with ddp.no_sync():
            ddp(batch(seed)).sum().backward()
        kept = [weakref.ref(param.grad) for param in ddp.parameters()]
        ddp(batch(seed)).sum().backward()
        ddp.zero_grad()
        assert not any(reference() is not None for reference in kept)


@VIEW
@ranks(2)
def test_wrapping_the_same_module_again_works_and_reduces_once(view: bool) -> None:
    model = layers()
    alone = copy.deepcopy(model)
    for round_ in range(3):
        ddp = wrap(model, view, bucket_cap_mb=1e-4 if round_ == 1 else None)
        alone.load_state_dict(model.state_dict())
        for seed in range(3):
            assert_right(ddp, alone, seed)
        assert ddp.reducer.counters.reductions == 3
        del ddp
        gc.collect()


class Broken(RuntimeError):
    pass


def break_off(model: nn.Module, layer: int, ranks_that_fail: list[int]) -> Any:
    """Let the backward fail behind ``layer``: later layers have their gradients by then."""

    def fail(_: Tensor) -> None:
        if dist.get_rank() in ranks_that_fail:
            raise Broken("boom")

    def on_output(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(fail)

    return model[layer].register_forward_hook(on_output)


@VIEW
# A hook on the output of the last layer runs before the wrapper sees that a backward has begun.
# Then a rank that fails alone looks like one that ran no backward, which no rank can tell.
@pytest.mark.parametrize(
    ("who", "layer"),
    [([0, 1], 0), ([0, 1], 2), ([0, 1], 4), ([0], 0), ([0], 2), ([1], 0), ([1], 2)],
)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@ranks(2)
def test_after_a_backward_that_broke_off_the_next_step_is_right(
    who: list[int], layer: int, first: bool, view: bool
) -> None:
    """Ranks that did not fail wait for the others' part and see NaN, not a mean without them."""
    model = layers()
    ddp = wrap(model, view, bucket_cap_mb=1e-6)
    alone = copy.deepcopy(model)
    if not first:
        for seed in range(2):
            assert_right(ddp, alone, seed)
    handle = break_off(model, layer, who)
    ddp.zero_grad()
    loss = ddp(batch(5)).pow(2).sum()
    failed = dist.get_rank() in who
    if failed:
        with pytest.raises(Broken):
            loss.backward()
        handle.remove()
    else:
        # Its peers take part in this reduction when they begin their next forward.
        loss.backward()
        handle.remove()
        alone.zero_grad()
        alone(batch(5)).pow(2).sum().backward()
        poisoned = [bool(param.grad.isnan().any()) for param in ddp.parameters()]
        # In the first step all is sent at the end. Later on, what was full before it broke was
        # sent as it should be: the layers above the one whose output raised.
        sent = 0 if first else {0: 4, 2: 2}[layer]
        assert poisoned == [True] * (6 - sent) + [False] * sent, poisoned
        for param, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert param.grad.isnan().any() or param.grad.ne(own.grad).any(), "a mean of one"
    for seed in (6, 7, 8):
        assert_right(ddp, alone, seed)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
@ranks(2)
def test_a_new_wrapper_after_a_backward_that_broke_off_on_one_rank(keeps: bool) -> None:
    """As after an error of memory: the old wrapper's collectives come before those of wrapping."""

    def broken_off() -> list[Any]:
        ddp = DistributedDataParallel(layers(), bucket_cap_mb=1e-6)
        step(ddp, 0)
        break_off(ddp.module, 2, [1])
        if dist.get_rank():
            with pytest.raises(Broken):
                step(ddp, 1)
        else:
            step(ddp, 1)
        return [ddp] if keeps else [weakref.ref(ddp._ddp_state.core)]

    kept = broken_off()
    module = layers()
    alone = copy.deepcopy(module)
    ddp = DistributedDataParallel(module)
    for seed in (2, 3):
        assert_right(ddp, alone, seed)
    if not keeps:
        assert kept[0]() is None


@VIEW
@ranks(2)
def test_a_backward_that_broke_off_under_no_sync_costs_nothing(view: bool) -> None:
    model = layers()
    ddp, alone = wrap(model, view), copy.deepcopy(model)
    assert_right(ddp, alone, 0)
    handle = break_off(model, 2, [dist.get_rank()] if dist.get_rank() else [])
    with ddp.no_sync():
        if dist.get_rank():
            with pytest.raises(Broken):
                ddp(batch(5)).pow(2).sum().backward()
        else:
            ddp(batch(5)).pow(2).sum().backward()
    handle.remove()
    for seed in (6, 7):
        assert_right(ddp, alone, seed)


@VIEW
@ranks(2)
def test_a_forward_that_raises_leaves_the_next_step_right(view: bool) -> None:
    model = layers()
    ddp, alone = wrap(model, view), copy.deepcopy(model)
    for seed in range(3):
        with pytest.raises(RuntimeError):
            ddp(torch.randn(3, 5))
        assert_right(ddp, alone, seed)


def made_sparse(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.to_sparse()


def cut_to(rows: int) -> Any:
    def cut(param: nn.Parameter) -> None:
        assert param.grad is not None
        grad, param.grad = param.grad, None
        param.data = param.data[:rows].clone()
        param.grad = grad[:rows].clone()

    return cut


@VIEW
@pytest.mark.parametrize("amiss", ["sparse", "two rows", "one row"])
@ranks(2)
def test_a_gradient_that_does_not_fit_is_named(amiss: str, view: bool) -> None:
    """On every rank. One row of four would fit by broadcasting: it is an error all the same."""
    model = layers()
    ddp = wrap(model, view)
    for seed in range(2):
        step(ddp, seed)
    ddp.zero_grad()
    loss = ddp(batch(3)).sum()
    hook = {"sparse": made_sparse, "two rows": cut_to(2), "one row": cut_to(1)}[amiss]
    model[2].weight.register_post_accumulate_grad_hook(hook)
    name = None if amiss == "one row" else r"rank \d.*'2.weight'"
    with pytest.raises(RuntimeError, match=name):
        loss.backward()


@VIEW
@ranks(2)
def test_evaluation_after_a_broken_backward_hangs_nobody(view: bool) -> None:
    """The other rank waits in its all-reduces while this one would broadcast buffers."""
    ddp = wrap(nn.Sequential(layers(), nn.BatchNorm1d(2)), view)
    for seed in range(2):
        step(ddp, seed)
    if dist.get_rank() == 1:
        weight = next(ddp.parameters())
        handle = weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(ddp, 2)
        handle.remove()
    else:
        step(ddp, 2)
    ddp.eval()
    with torch.no_grad():
        ddp(batch(3))
    ddp.train()
    step(ddp, 4)
    assert all(param.grad.isfinite().all() for param in ddp.parameters())
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@VIEW
@pytest.mark.parametrize("local", [False, True], ids=["reduced", "no_sync"])
@ranks(2)
def test_a_backward_right_after_a_broken_one_is_reduced(local: bool, view: bool) -> None:
    """Without a forward between them: the second one runs on the same graph."""
    ddp = wrap(layers(), view)
    alone = copy.deepcopy(ddp.module)
    for seed in range(2):
        step(ddp, seed)
    outputs = {net: net(batch(5)) for net in (ddp, alone)}
    handle = next(ddp.parameters()).register_hook(lambda grad: 1 / 0)
    ddp.require_backward_grad_sync = not local
    with pytest.raises(ZeroDivisionError):
        outputs[ddp].sum().backward(retain_graph=True)
    ddp.require_backward_grad_sync = True
    handle.remove()
    for net, output in outputs.items():
        net.zero_grad()
        output.pow(2).sum().backward()
    for param, own in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, sum(gather(own.grad)) / 2)


@VIEW
@ranks(2)
def test_an_interrupt_at_the_end_of_a_backward_leaves_nothing_on_its_way(view: bool) -> None:
    model = layers()
    ddp = wrap(model, view, bucket_cap_mb=1e-5)
    alone = copy.deepcopy(model)

    def interrupted(run: Any, bucket: Any) -> Any:
        if bucket.index == 1:
            raise KeyboardInterrupt
        return wait(run, bucket)

    for seed in (0, 10):  # the first reduction ends with the order of gradients
        transport: Any = ddp._ddp_state.core.transport
        wait = transport.wait
        if dist.get_rank() == 0:
            transport.wait = interrupted
            with pytest.raises(KeyboardInterrupt):
                step(ddp, seed)
            transport.wait = wait
        else:
            step(ddp, seed)
        assert_right(ddp, alone, seed + 1)
        assert_right(ddp, alone, seed + 2)


@ranks(2)
def test_outputs_can_still_be_saved() -> None:
    ddp = wrap(layers(), False)
    buffer = io.BytesIO()
    torch.save(ddp(batch(0)), buffer)
    assert buffer.tell() > 0
