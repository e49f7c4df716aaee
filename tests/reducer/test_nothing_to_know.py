"""Nothing to know: each case of the table gives the mean of what each rank's own model computes."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case
from distributed import VIEW, Calls, assert_same_on_all_ranks, ranks, recorded_collectives
from oracle import Net, adopt, assert_gradients, mean_over_ranks, one_per_rank, seed
from torch import Tensor, nn
from training import gradients

from tritonddp import DistributedDataParallel

VARIANT = pytest.mark.parametrize("variant", ["plain", "small-buckets", "no-sync-first"])
NAME = pytest.mark.parametrize("name", CASES)
# What happens to gradients after each step.
HABITS = ["drop", "keep", "drop"]


@pytest.mark.sampled(5, 2)
@VARIANT
@VIEW
@NAME
@ranks(2)
def test_mean_of_what_each_rank_computes_alone(name: str, view: bool, variant: str) -> None:
    """And no collective but one all-reduce a bucket and reduction, and one agreement on the order.

    Small buckets hold a parameter or two. With no-sync-first, each reduced backward comes after a
    forward and a backward of a microbatch under ``no_sync``, which uses other parameters on each
    rank, and gradients go through memory that the ranks share, without collectives.
    """
    check(name, view, local="no-sync" in variant, cap=1e-4 if "small" in variant else None)


@pytest.mark.sampled(5, 2)
@pytest.mark.parametrize("variant", ["copies", "views-no-sync-first-small-buckets"])
@NAME
@ranks(3)
def test_mean_of_what_each_of_three_ranks_computes_alone(name: str, variant: str) -> None:
    """Small buckets hold up to two layers: three ranks on few cores wait long for each."""
    cap = 4e-4 if "small" in variant else None
    check(name, view="views" in variant, local="no-sync" in variant, cap=cap)


def check(name: str, view: bool, local: bool, cap: float | None) -> None:
    rank, size, case = dist.get_rank(), dist.get_world_size(), CASES[name]
    expected = oracle(name, size, local)
    options = {
        "bucket_cap_mb": cap,
        "gradient_as_bucket_view": view,
        "transport": "auto" if local else "process_group",  # through memory, which needs none
    }
    nets = [DistributedDataParallel(module, **options, **case.options) for module in models(case)]
    reduced: list[Tensor | None] = []
    for step, habit in enumerate(HABITS):
        buckets = [len(net.reducer.buckets) for net in nets]
        known = {param for net in nets for param in net.parameters()}
        with recorded_collectives() as calls:
            run(case, nets, rank, step, local)
        what = f"{name}, step {step}"
        if not local:
            check_collectives(calls, case, nets, buckets, known, step, cap is not None, what)
        for net, means in zip(nets, expected[step], strict=True):
            assert_gradients(net, means, what)
            reduced += gradients(net)
            if habit == "drop":
                net.zero_grad()
    assert_same_on_all_ranks(reduced, f"{name}, gradients of all steps")


def models(case: Case) -> list[nn.Module]:
    """The same ones each time, on every rank."""
    torch.default_generator.manual_seed(0)
    return [model.double() for model in case.models()]


@functools.lru_cache(maxsize=2)  # the tests that need the same come one after the other
def oracle(name: str, size: int, local: bool) -> list[list[list[Tensor | None]]]:
    """The gradients of each parameter, net and step."""
    case = CASES[name]
    alone = [one_per_rank(module) for module in models(case)]
    steps = []
    for step, habit in enumerate(HABITS):
        for number in range(size):
            run(case, [copies[number] for copies in alone], number, step, local)
        means = [mean_over_ranks(copies) for copies in alone]
        for copies, each in zip(alone, means, strict=True):
            adopt(copies, each if habit == "keep" else [None] * len(each))
        steps.append(means)
    return steps


def run(case: Case, nets: Sequence[Net], rank: int, step: int, local: bool) -> None:
    seed(rank, step)
    net: Any = nets[0] if len(nets) == 1 else nets
    with microbatches(case, nets, rank) if local else contextlib.nullcontext():
        case.step(net, rank, step)


@contextlib.contextmanager
def microbatches(case: Case, nets: Sequence[Net], rank: int) -> Iterator[None]:
    """Before each reduced ``backward()`` comes a forward and a backward under ``no_sync``."""
    weighted = {"n": 0.5 + rank, "reduction": case.weighted}
    original: Callable[..., None] = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for net in nets:
            if net.require_backward_grad_sync:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(net.no_sync())
                    if case.weighted:
                        stack.enter_context(net.weighted(**weighted))
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
    known: Collection[nn.Parameter],
    step: int,
    small: bool,
    what: str,
) -> None:
    """One all-reduce a bucket and reduction; after the first reduction the order is agreed.

    Unless some ranks alone have used a parameter: then it is that of registration.

    What is reduced on request has buckets of its own. Parameters that were added or unfrozen get
    new ones, on which the ranks agree by one all-reduce. Those that are not ``known`` get the
    values of rank 0.
    """
    reduced = broadcasts = own = 0
    for net, before, reductions in zip(nets, buckets_before, case.reductions, strict=True):
        assert net.reducer.counters.reductions == reductions * (step + 1), what
        if reductions:  # the buckets that one leaves behind are those of the next
            sent = net._ddp_state.core.last
            last = len(sent.pending) - len(sent.skipped)
            first = last if step in case.adds else before
            reduced += first + (reductions - 1) * len(net.reducer.buckets)
            broadcasts += step == 0 and not net._ddp_state.core.manager.keeps_order
        broadcasts += any(param not in known for param in net.parameters())
        own += case.requests + (step in case.adds)
    # Small buckets go directly.
    names = [name.replace("all_to_all_single", "all_reduce") for name in calls.names]
    all_reduces = names.count("all_reduce")
    most = len(list(nets[0].parameters())) if small else 1
    assert reduced + own <= all_reduces <= reduced + own * most, what
    if any(True for net in nets for _ in net.buffers()):  # these are broadcast by the forward
        return
    verified = ["all_gather"] * (case.requests * case.names_params)
    expected = verified + ["all_reduce"] * all_reduces + ["broadcast"] * broadcasts
    assert sorted(names) == expected, what
    assert calls.on_the_group == len(calls), f"{what}: collectives beside torch.distributed"
