"""``add_scalars()`` sums numbers over the ranks, in the collectives of the gradients."""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks, recorded_collectives
from modules import mlp
from training import HEADER_BYTES, WAYS, drawn, squares, wrap

from tritonddp import DistributedDataParallel

NAMES = ("loss", "tokens")
MANY = 2**40 + 1  # not exact in fp32


def step(net: Any, number: int = 0, adds: bool = True) -> tuple[float, int]:
    """Train, and return the scalars of this rank."""
    net.zero_grad()
    loss = squares(net(drawn(5, 4, step=number)))
    tokens = MANY + dist.get_rank()
    if adds:
        net.add_scalars(loss=loss, tokens=tokens)
    loss.backward()
    return loss.item(), tokens


def assert_reduced(net: Any, own: Any) -> None:
    """The sums of the scalars ``own`` over the ranks are exact."""
    found = net.reduced_scalars()
    assert list(found) == list(NAMES)
    for values, scalar in zip(zip(*gather(own), strict=True), found.values(), strict=True):
        total = torch.tensor(math.fsum(values), dtype=torch.float64)
        assert_same_bits(scalar, [total, total / len(values)])


@pytest.mark.parametrize("name", ["lazy views", "process group", "bf16", "int8"])
@ranks(3)
def test_sums_and_means_are_exact_in_any_dtype_of_the_buckets(name: str) -> None:
    ddp = DistributedDataParallel(mlp(4, 300, 2), **WAYS[name], bucket_cap_mb=0.001, scalars=NAMES)
    for number in range(4):
        assert_reduced(ddp, step(ddp, number))


@ranks(2)
def test_there_is_no_additional_collective_and_without_the_option_no_byte() -> None:
    module = mlp(4, 8, 2)
    ddp, plain = wrap(module, scalars=NAMES), wrap(copy.deepcopy(module))
    sent = []
    for net in (ddp, plain):
        for number in range(3):
            with recorded_collectives() as calls:
                step(net, number, adds=net is ddp)
                net.reduced_scalars()
        sent.append(calls.names)
    assert sent[0] == sent[1]
    assert plain._ddp_state.core.agreement.size == HEADER_BYTES


@ranks(2)
def test_calls_in_accumulated_microbatches_add_up(rank: int) -> None:
    ddp = wrap(mlp(4, 8, 2), scalars=NAMES)
    calls = 2 + rank  # ranks may call it different numbers of times
    added = []
    for number in range(calls):
        with nullcontext() if number == calls - 1 else ddp.no_sync():
            loss = squares(ddp(drawn(5, 4, step=number)))
            ddp.add_scalars(loss=loss, tokens=number)
            loss.backward()
        added.append(float(loss))
    found = ddp.reduced_scalars()
    everyones = [each for losses in gather(added) for each in losses]
    assert found["loss"].sum.item() == pytest.approx(math.fsum(everyones), rel=1e-15)
    assert found["loss"].mean.item() == pytest.approx(math.fsum(everyones) / 5, rel=1e-15)
    assert found["tokens"].sum.item() == 1 + 3


@ranks(3)
def test_the_mean_is_weighted_as_the_gradients_are(rank: int) -> None:
    ddp = wrap(mlp(4, 8, 2), scalars="loss")
    for reduction, mean in ("mean", (10 + 2 * 20) / 3), ("sum", (10 + 20) / 3):
        with ddp.weighted(rank, reduction=reduction):
            # The mean over no items is NaN.
            ddp.add_scalars(loss=10.0 * rank if rank or reduction == "sum" else math.nan)
            ddp(drawn(5, 4)).sum().backward()
        assert ddp.reduced_scalars()["loss"].mean.item() == pytest.approx(mean)


@ranks(2)
def test_without_a_call_the_sum_is_zero_and_the_mean_nan() -> None:
    ddp = wrap(mlp(4, 8, 2), scalars="loss")
    assert ddp.reduced_scalars()["loss"].mean.isnan()  # before any reduction
    for adds, total in (True, 2), (False, 0):
        if adds:
            ddp.add_scalars(loss=1)
        ddp(drawn(5, 4)).sum().backward()
        found = ddp.reduced_scalars()["loss"]
        assert (found.sum.item(), found.mean.isnan().item()) == (total, not adds)


@ranks(3)
def test_a_rank_without_scalars_is_named(rank: int) -> None:
    ddp = wrap(mlp(4, 8, 2), scalars=NAMES)
    step(ddp)
    with pytest.raises(
        RuntimeError,
        match=rf"rank {rank}, step 2, bucket 0: only some ranks called add_scalars\(\): "
        r"rank 0: 'loss', 'tokens'; rank 1: none; rank 2: 'loss', 'tokens'",
    ):
        step(ddp, adds=rank != 1)
    assert_reduced(ddp, step(ddp))


@ranks(1)
def test_errors_of_names_and_values() -> None:
    ddp = wrap(mlp(4, 8, 2), scalars=NAMES)
    with pytest.raises(ValueError, match=r"\('loss', 'tokens'\), got 'loss'$"):
        ddp.add_scalars(loss=1)
    for wrong in ("1", torch.ones(2), 1j, 10**400):
        with pytest.raises(TypeError, match="scalar 'tokens' should be one real number"):
            ddp.add_scalars(loss=1, tokens=wrong)
    plain = wrap(mlp(4, 8, 2))
    with pytest.raises(ValueError, match=r"\(none\), got 'loss'"):
        plain.add_scalars(loss=1)
    assert plain.reduced_scalars() == {}
    for wrong_names in (3, ("a", "a"), ""):
        with pytest.raises(ValueError, match="scalars should be"):
            DistributedDataParallel(mlp(4, 8, 2), scalars=wrong_names)  # type: ignore[arg-type]
