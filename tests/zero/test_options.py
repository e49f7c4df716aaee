"""Options of the wrapper, and what travels."""

import pytest
import torch
import torch.distributed as dist
from beside_replicated import TRANSPORTS, Pair
from distributed import ranks
from modules import linears, mlp
from training import counted, drawn, squares


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2)
def test_views_of_lazy_buckets(transport: str) -> None:
    lazy = {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True}
    pair = Pair(mlp(4, 8, 8, 8, 2), wrapper={**TRANSPORTS[transport], **lazy})
    for number in range(6):
        pair.step(drawn(5, 4, step=number))


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


@ranks(2, 3)
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
