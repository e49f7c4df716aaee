"""Options of the wrapper, and what travels."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_replicated import TRANSPORTS, Pair
from distributed import assert_same_bits, gather, ranks, recorded_collectives
from modules import Layers, Two, linears, mlp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as StockZero
from torch.nn.parallel import DistributedDataParallel as Stock
from training import counted, delayed, drawn, squares

OPTIONS: dict[str, dict[str, Any]] = {
    "all used": {"find_unused_parameters": False},
    "lazy": {"lazy_bucket_allocation": True},
    "lazy views": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "skipping": {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
    "metrics": {"metrics": True},
    "finite": {"check_finite": "raise"},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "one bucket": {"bucket_cap_mb": 100},
    "no broadcast": {"broadcast_buffers": False, "init_sync": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2)
def test_the_options_of_a_wrapper_mean_what_they_do_without_it(transport: str, option: str) -> None:
    pair = Pair(mlp(4, 8, 8, 8, 2), wrapper={**TRANSPORTS[transport], **OPTIONS[option]})
    for number in range(6):
        pair.step(drawn(5, 4, step=number))


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, views=True)
def test_delayed_gradients_reach_their_owner(view: bool, transport: str) -> None:
    module = mlp(4, 8, 8, 2)
    wrapper = {**TRANSPORTS[transport], "gradient_as_bucket_view": view}
    pair: Any = Pair.__new__(Pair)
    pair.tolerance = None
    import copy

    from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer

    nets = []
    for each in (module, copy.deepcopy(module)):
        late = delayed(each, "0.weight", "2.bias", until=each[4].weight)
        nets.append(DistributedDataParallel(each, **wrapper, **late))
    pair.zero, pair.plain = nets
    pair.optimizer = ZeroRedundancyOptimizer(nets[0].parameters(), torch.optim.AdamW, lr=0.1)
    pair.oracle = torch.optim.AdamW(nets[1].parameters(), lr=0.1)
    for number in range(5):
        pair.step(drawn(5, 4, step=number))


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, 3)
def test_skipped_parameters_are_the_same_on_all_ranks(rank: int, transport: str) -> None:
    wrapper = {"skip_all_reduce_unused_params": True, "find_unused_parameters": True}
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dist.get_world_size() > 2 else None
    pair = Pair(
        Layers("abcd"),
        torch.optim.SGD,
        wrapper={**TRANSPORTS[transport], **wrapper},
        tolerance=tolerance,
    )
    for number, order in enumerate(["abcd", "ab", "ab", "cd", "d", "abcd"]):
        pair.step(drawn(5, 4, step=number), order)


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, views=True)
def test_weighted_backwards(rank: int, view: bool, transport: str) -> None:
    pair = Pair(mlp(4, 8, 8, 2), wrapper={**TRANSPORTS[transport], "gradient_as_bucket_view": view})
    for number in range(6):
        for net, _ in pair.each():
            if number % 2:
                with net.no_sync(), net.weighted(1 + rank):
                    net(drawn(1 + rank, 4, step=50 + number)).square().mean().backward()
            items = 0 if number == 4 and rank == 1 else 3 - rank
            with net.weighted(items):
                net(drawn(3 - rank, 4, step=number)).square().mean().backward()
        if number:
            pair.check_gradients(f"step {number}")
        pair.end(f"step {number}")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("at", [0, 2, 4])
@ranks(2)
def test_a_gradient_that_is_not_finite_is_reported_on_all_ranks(
    rank: int, at: int, transport: str
) -> None:
    """Whoever owns it."""
    pair = Pair(mlp(4, 8, 8, 2), wrapper={**TRANSPORTS[transport], "check_finite": "raise"})
    for number in range(4):
        for net, optimizer in pair.each():
            x = drawn(5, 4, step=number)
            if number == 2:
                weight = net.module[at].weight
                bad = weight.register_hook(lambda grad: grad * (float("nan") if rank else 1))
                with pytest.raises(FloatingPointError, match=f"{at}.weight"):
                    squares(net(x)).backward()
                bad.remove()
            else:
                squares(net(x)).backward()
                optimizer.step()
            optimizer.zero_grad()
        pair.check(f"step {number}")


@ranks(2)
def test_buffers_are_synchronized(rank: int) -> None:
    pair = Pair(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    for number in range(5):
        pair.step(drawn(5, 4, step=number))
        assert_same_bits(
            dict(pair.zero.module.named_buffers()), dict(pair.plain.module.named_buffers())
        )


@ranks(2)
def test_evaluation_between_steps(rank: int) -> None:
    pair = Pair(Two())
    for number in range(4):
        pair.step(drawn(5, 3, step=number))
        with torch.no_grad():
            outputs = [net(drawn(5, 3, step=7)) for net, _ in pair.each()]
        assert_same_bits(*outputs)


@ranks(2)
def test_check_sync_compares_what_is_alike(rank: int) -> None:
    """Of gradients that have an owner there is one."""
    pair = Pair(mlp(4, 8, 2))
    for number in range(4):
        squares(pair.zero(drawn(5, 4, step=number))).backward()
        pair.zero.check_sync()
        pair.optimizer.step()
        pair.zero.check_sync()
        pair.optimizer.zero_grad()
    with torch.no_grad():
        pair.zero.module[0].weight += rank
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        pair.zero.check_sync()


# Bytes


@ranks(2, 3, 4)
def test_a_step_sends_no_more_than_that_of_the_plain_optimizer(rank: int) -> None:
    """Gradients take half of an all-reduce, values as much; flags a little."""
    module = linears(*[256] * 13, bias=False)
    tolerance = {"rtol": 1, "atol": 1}
    pair = Pair(
        module, torch.optim.SGD, wrapper=TRANSPORTS["process group"], lr=1e-6, tolerance=tolerance
    )
    for number in range(4):
        pair.step(drawn(5, 256, step=number))
    sent = []
    for net, optimizer in pair.each():
        with counted(net) as counters:
            squares(net(drawn(5, 256, step=9))).backward()
            gradients = net.reducer.counters.sent_bytes
            optimizer.step()
            values = net.reducer.counters.sent_bytes - gradients
        sent.append((counters.sent_bytes, values))
    nbytes = sum(param.nbytes for param in module.parameters())
    size = dist.get_world_size()
    (total, values), (plain, nothing) = sent
    assert nothing == 0
    assert values == pytest.approx(nbytes * (size - 1) / size, rel=0.01)
    assert total <= plain * 1.01


def _traffic(calls: Any) -> float:
    """Bytes that a rank sends on average in these collectives, by the usual algorithms."""
    size = dist.get_world_size()
    factor = {"all_reduce": 2, "broadcast": 1, "reduce": 1}
    sent = sum(factor.get(name, 0) * t.nbytes * (size - 1) / size for name, t in calls)
    # Of an all-gather the first tensor is that of one rank.
    sent += sum(t.nbytes * (size - 1) for name, t in calls if name == "all_gather")
    return sent + sum(t.nbytes for name, t in calls if name == "send")


@ranks(2, 3)
def test_torchs_own_sends_half_as_much_again(rank: int) -> None:
    """Counted by the collectives that both ask for, as tensors."""
    pair = Pair(
        linears(*[64] * 13, bias=False),
        torch.optim.SGD,
        wrapper=TRANSPORTS["process group"],
        lr=1e-6,
        tolerance={"rtol": 1, "atol": 1},
    )
    for number in range(3):
        pair.step(drawn(5, 64, step=number))
    with recorded_collectives() as calls:
        squares(pair.zero(drawn(5, 64))).backward()
        pair.optimizer.step()
    ours = _traffic(calls)
    stock = Stock(linears(*[64] * 13, bias=False))
    optimizer = StockZero(stock.parameters(), torch.optim.SGD, lr=1e-6)
    for number in range(3):
        squares(stock(drawn(5, 64, step=number))).backward()
        optimizer.step()
    nbytes = sum(param.nbytes for param in stock.parameters())
    size = dist.get_world_size()
    with recorded_collectives() as calls:
        optimizer.step()
    theirs = _traffic(calls) + 2 * nbytes * (size - 1) / size  # its reducer, in C++, all-reduces
    assert {name for name, _ in calls} == {"broadcast"}
    assert theirs / ours == pytest.approx(1.5, rel=0.02)
    assert len({*map(str, gather(ours))}) == 1
