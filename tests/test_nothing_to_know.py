"""Nothing to know: each case of the table gives the mean of what each rank's own model computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from cases import CASES, Case
from distributed import Calls, ranks, recorded_collectives
from oracle import Net, assert_mean, one_per_rank, seed
from torch import Tensor

from tritonddp import DistributedDataParallel

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
VARIANT = pytest.mark.parametrize("variant", ["plain", "small-buckets", "no-sync-first"])
NAME = pytest.mark.parametrize("name", list(CASES))
# What happens to gradients after each step.
HABITS = ["drop", "keep", "drop"]


@VARIANT
@VIEW
@NAME
@ranks(2, 3)
def test_mean_of_what_each_rank_computes_alone(name: str, view: bool, variant: str) -> None:
    """And no collective but one all-reduce a bucket and reduction, and one agreement on the order.

    Small buckets hold a parameter or two. With no-sync-first, each reduced backward comes after a
    forward and a backward of a microbatch under ``no_sync``, which uses other parameters on each
    rank.
    """
    rank, size, case = dist.get_rank(), dist.get_world_size(), CASES[name]
    modules = [model.double() for model in case.models()]
    caps: dict[str, Any] = {"bucket_cap_mb": 1e-4} if variant == "small-buckets" else {}
    alone = [one_per_rank(module) for module in modules]
    nets = [
        DistributedDataParallel(module, gradient_as_bucket_view=view, **caps, **case.options)
        for module in modules
    ]
    for step, habit in enumerate(HABITS):
        for number in range(size):
            run(case, [models[number] for models in alone], number, step, variant)
        buckets = [len(net.reducer.buckets) for net in nets]
        with recorded_collectives() as calls:
            run(case, nets, rank, step, variant)
        what = f"{name}, step {step}"
        check_collectives(calls, case, nets, buckets, step, what)
        for net, models in zip(nets, alone, strict=True):
            assert_mean(net, models, what)
            for model in [net, *models]:
                if habit == "drop":
                    model.zero_grad()


def run(case: Case, nets: Sequence[Net], rank: int, step: int, variant: str) -> None:
    seed(rank, step)
    net: Any = nets[0] if len(nets) == 1 else nets
    with microbatches(nets, rank) if variant == "no-sync-first" else contextlib.nullcontext():
        case.step(net, rank, step)


@contextlib.contextmanager
def microbatches(nets: Sequence[Net], rank: int) -> Iterator[None]:
    """Before each reduced ``backward()`` comes a forward and a backward under ``no_sync``."""
    original: Callable[..., None] = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for net in nets:
            if net.require_backward_grad_sync:
                with net.no_sync():
                    original(net.module.microbatch(net, rank))
        original(loss, *args, **kwargs)

    Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.backward = original  # type: ignore[method-assign]


def check_collectives(
    calls: Calls,
    case: Case,
    nets: Sequence[DistributedDataParallel],
    buckets_before: Sequence[int],
    step: int,
    what: str,
) -> None:
    """One all-reduce a bucket and reduction; after the first reduction the order is agreed."""
    all_reduces = broadcasts = 0
    for net, before, reductions in zip(nets, buckets_before, case.reductions, strict=True):
        assert net.reducer.counters.reductions == reductions * (step + 1), what
        first = step == 0 and reductions > 0
        later = reductions - first
        all_reduces += first * before + later * len(net.reducer.buckets)
        broadcasts += first
    if any(True for net in nets for _ in net.buffers()):  # these are broadcast by the forward
        assert calls.names.count("all_reduce") == all_reduces, what
        return
    assert sorted(calls.names) == ["all_reduce"] * all_reduces + ["broadcast"] * broadcasts, what
    assert calls.on_the_group == len(calls), f"{what}: collectives beside torch.distributed"
