"""``check_finite`` names the parameters and the ranks with NaN or Inf in a gradient."""

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from distributed import recorded_collectives as recorded
from modules import Kinds, linears
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import assert_gradients_alike, counted, raises_if, warned, ways

from tritonddp import DistributedDataParallel

WAYS = ways("copies", "views", "lazy", "bf16", "int8")
SMALL = {"bucket_cap_mb": 0.004}  # several buckets


def net(**options: Any) -> tuple[nn.Sequential, DistributedDataParallel]:
    torch.manual_seed(0)
    module = linears(40, 50, 40, 3)
    return module, DistributedDataParallel(module, **{"check_finite": "raise", **SMALL, **options})


def spoiled(loss: Tensor, gradients: dict[Tensor, float]) -> Tensor:
    """A loss whose backward adds these numbers to one element of the gradients."""
    for param, number in gradients.items():
        loss = loss + param.view(-1)[-1] * number
    return loss


def outcome(loss: Tensor) -> str:
    try:
        loss.backward()
    except FloatingPointError as error:
        return str(error)
    return "nothing"


def found(text: str) -> dict[str, str]:
    """The first name of each bucket, and its ranks."""
    return dict(re.findall(r"'([\w.]+)'[^(]*\(bucket \d+\) on (ranks? [^.;]+)", text))


@pytest.mark.parametrize("way", WAYS)
@ranks(3)
def test_every_rank_names_the_parameters_and_the_ranks(rank: int, way: str) -> None:
    module, ddp = net(**WAYS[way])
    first, last = module[0].weight, module[2].bias
    # For each step: the numbers that ranks add to gradients, and the names and ranks of the error.
    steps: list[tuple[dict[int, dict[Tensor, float]], dict[str, str]]] = [
        ({}, {}),
        ({1: {first: math.nan}}, {"0.weight": "rank 1"}),
        (
            {0: {last: math.inf}, 2: {last: -math.inf, first: math.inf}},
            {"0.weight": "rank 2", "2.bias": "ranks 0 and 2"},
        ),
        ({}, {}),
    ]
    for step, (plan, expected) in enumerate(steps, start=1):
        ddp.zero_grad()
        torch.manual_seed(10 * step + rank)
        loss = ddp(torch.randn(4, 40)).square().mean()
        text = outcome(spoiled(loss, plan.get(rank, {})))
        texts = gather(text)
        if not plan:
            assert texts == ["nothing"] * 3
        else:
            assert text.startswith(f"rank {rank}, step {step}: NaN or Inf in the gradients of ")
            assert len({each.partition(", ")[2] for each in texts}) == 1
        assert found(text) == expected
        spoilt = {param for each in plan.values() for param in each}
        for param in module.parameters():
            assert param.grad.isfinite().all() == (param not in spoilt)
        assert_gradients_alike(module)


@ranks(2)
def test_it_needs_no_additional_launch_or_collective() -> None:
    def work(**options: Any) -> tuple[int, int, int, int]:
        module, ddp = net(**{"check_finite": None, "transport": "process_group", **options})
        loss = spoiled(ddp(torch.randn(4, 40)).sum(), {module[0].weight: math.inf})
        with recorded() as calls, counted(ddp) as found:
            outcome(loss)
        sizes = sum(bucket.nbytes for bucket in ddp.reducer.buckets)
        places = len(ddp.reducer.buckets) * dist.get_world_size()  # of four bytes
        nbytes = sizes - 4 * bool(options) * places
        return len(calls), found.flattens, found.unflattens, nbytes

    assert work() == work(check_finite="raise")


ROWS = torch.tensor([1, 7])


@ranks(2)
def test_the_error_explains_an_overflow_in_reduce_dtype(rank: int) -> None:
    ddp = DistributedDataParallel(Kinds(), check_finite="raise", reduce_dtype=torch.float16)
    text = outcome(ddp(ROWS, single=140_000.0 if rank else 120_000.0))
    assert found(text) == {"single": "rank 1"}
    assert "(Values above 65504 are Inf in fp16.)" in text


@ranks(2)
def test_a_rank_without_inputs_warns(rank: int) -> None:
    module, ddp = net()
    outcomes = []
    with warned() as messages, ddp.join():
        for step in range(3 if rank == 0 else 1):
            ddp.zero_grad()
            loss = ddp(torch.randn(4, 40)).sum()
            bad = {module[0].bias: math.nan} if step == 1 else {}
            outcomes.append(found(outcome(spoiled(loss, bad))))
    if rank == 0:
        assert outcomes == [{}, {"0.bias": "rank 0"}, {}]
        assert not messages
    else:
        assert [found(each) for each in messages] == [{"0.bias": "rank 0"}]


@ranks(2)
def test_parameters_without_elements_or_gradients_are_finite(rank: int) -> None:
    module = linears(40, 50, 3)
    module.empty, module[0].unused = nn.Parameter(torch.ones(0)), nn.Linear(40, 50)
    ddp = DistributedDataParallel(module, check_finite="raise", compression="int8")
    for number in (0.0, math.nan):
        ddp.zero_grad()
        loss = ddp(torch.randn(4, 40)).sum() + module.empty.sum()
        text = outcome(spoiled(loss, {module[0].weight: number * rank} if rank else {}))
        assert found(text) == ({"0.weight": "rank 1"} if math.isnan(number) else {})


@ranks(2)
def test_the_error_names_some_buckets_and_counts_the_others() -> None:
    ddp = DistributedDataParallel(linears(*[4] * 8), check_finite="raise", bucket_cap_mb=1e-5)
    with pytest.raises(FloatingPointError, match=r"; and \d+ more\."):
        (ddp(torch.ones(1, 4)) * math.nan).sum().backward()


@ranks(2)
def test_nan_of_a_failed_communication_hook_is_attributed_to_its_rank(rank: int) -> None:
    _, ddp = net()

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = allreduce_hook(None, bucket)
        if fails and rank == 1 and bucket.buffer().any():
            raise ZeroDivisionError
        return future

    ddp.register_comm_hook(None, hook)
    for fails in (False, True, False):
        ddp.zero_grad()
        loss, names = ddp(torch.randn(4, 40)).sum(), []
        with raises_if(fails and rank == 1, RuntimeError, "hook failed: ZeroDivisionError"):
            names = list(found(outcome(loss)).items())
        buckets = [(bucket.names[0], "rank 1") for bucket in ddp.reducer.buckets]
        assert names == (buckets if fails and rank == 0 else [])
