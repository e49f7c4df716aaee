"""The named programs: tritonddp gives the means, and stock DDP gives what ``README.md`` says.

Each rank compares its gradients with the oracle of ``tests/oracle.py``.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from distributed import ranks, run_ranks
from oracle import Alone, adopt, assert_gradients, mean_over_ranks, seed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as Stock
from training import assert_gradients_alike

from differential.in_ranks import STOCK_DEFINES, configured
from differential.named import PROGRAMS, Named
from differential.named.table import ERRORS, HANGS, RIGHT, TWICE, TWICE_HANGS, WRONG
from tritonddp import DistributedDataParallel

SMALL_VIEWS = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}
# Options, and whether a microbatch runs before each reduced backward.
VARIANTS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    (SMALL_VIEWS, True),
    (SMALL_VIEWS, False),
    ({}, True),
]
STEPS = 3


@contextlib.contextmanager
def microbatches(program: Named, nets: Sequence[Any], rank: int) -> Iterator[None]:
    """Context: before each reduced ``backward()``, a forward and a backward under ``no_sync``."""
    original: Callable[..., None] = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for net in nets:
            if net.require_backward_grad_sync:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(net.no_sync())
                    if program.weighted:
                        stack.enter_context(net.weighted(0.5 + rank, program.weighted))
                    original(net.module.microbatch(net, rank))
        original(loss, *args, **kwargs)

    Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.backward = original  # type: ignore[method-assign]


def play(name: str, wrap: Callable[..., Any], accumulates: bool = False) -> tuple[Any, list[str]]:
    """Return the wrapped models after all steps, and each difference from the oracle in words."""
    program, differences = PROGRAMS[name], []
    nets = [wrap(model, **program.options) for model in program.make()]
    alone = [[*map(Alone, program.make())] for _ in range(dist.get_world_size())]
    for number in range(STEPS):
        for rank, its in [*enumerate(alone), (dist.get_rank(), nets)]:
            seed(rank, number)
            for net in its if number < STEPS - 1 else ():  # the last step adds to the gradients
                net.zero_grad()
            with microbatches(program, its, rank) if accumulates else contextlib.nullcontext():
                program.step(its if len(its) > 1 else its[0], rank, number)
        for net, *unwrapped in zip(nets, *alone, strict=True):
            means = mean_over_ranks(unwrapped)
            adopt(unwrapped, means)
            try:
                assert_gradients(net, means, f"step {number}")
            except AssertionError as error:
                differences.append(str(error))
            # Without a collective for stock: a rank may have failed.
            if isinstance(net, DistributedDataParallel):
                assert_gradients_alike(net, f"step {number}")
    return nets, differences


@pytest.mark.parametrize("name", PROGRAMS)
@ranks(2, 3)
def test_named_programs_see_the_mean_of_what_each_rank_computes(name: str) -> None:
    for number, (options, accumulates) in enumerate(VARIANTS):
        for transport in ("auto", "process_group"):
            wrap = partial(DistributedDataParallel, transport=transport, **options)
            with configured(number + [*PROGRAMS].index(name)):
                nets, differences = play(name, wrap, accumulates)
            assert not differences, (options, accumulates, transport)
            for net, count in zip(nets, PROGRAMS[name].reductions, strict=True):
                assert net.reducer.counters.reductions == STEPS * count


class StockWithNames(Stock):
    """Stock DDP with the methods of tritonddp, which do nothing."""

    reduce_gradients = Alone.reduce_gradients

    def weighted(self, n: float, reduction: str = "mean") -> Any:
        return contextlib.nullcontext()


def played_by_stock(name: str, finds_unused: bool) -> str:
    """The outcome on this rank, or its error."""
    seconds = 5 if HANGS in PROGRAMS[name].stock[finds_unused] else 60
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    options = {"find_unused_parameters": True} if finds_unused else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _, differences = play(name, partial(StockWithNames, process_group=group, **options))
        except Exception as error:
            return str(error)
    return WRONG if differences else RIGHT


def outcome(results: Sequence[str]) -> str:
    """The outcome of all ranks: the error of one rank causes what the other ranks see."""
    found = [key for key, text in ERRORS.items() if any(re.search(text, each) for each in results)]
    if {*found} == {TWICE, HANGS}:
        return TWICE_HANGS
    errors = [each for each in results if each not in (RIGHT, WRONG)]
    return next(iter([*found, *errors]), WRONG if WRONG in results else RIGHT)


@pytest.mark.parametrize("name", PROGRAMS)
def test_stock_does_what_the_page_says(name: str) -> None:
    if name.startswith("batch_norm") and not STOCK_DEFINES:
        return  # torch 2.11 writes into buffers that a backward needs: another outcome
    outcomes = tuple(outcome(run_ranks(played_by_stock, 2, name, flag)) for flag in (False, True))
    assert outcomes == PROGRAMS[name].stock
