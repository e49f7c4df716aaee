"""Parameter groups, closures, and a second optimizer of a wrapper."""

from typing import Any

import pytest
import torch
from beside_replicated import Pair
from distributed import ranks
from modules import mlp
from training import drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer


@ranks(2)
def test_a_group_that_differs_or_cannot_have_owners_is_refused_on_all_ranks(rank: int) -> None:
    pair = Pair(mlp(4, 8, 8, 2), params=lambda net: list(net.module[4].parameters()))
    first = pair.zero.module[0]
    other = pair.zero.module[2].bias if rank == 1 else first.weight
    with pytest.raises(RuntimeError, match="rank 1"):
        pair.optimizer.add_param_group({"params": [other]})
    twice = pair.zero.module[4].bias if rank == 1 else first.weight
    with pytest.raises(RuntimeError, match="ValueError: some parameters appear"):
        pair.optimizer.add_param_group({"params": [twice]})
    for net, optimizer in pair.each():
        optimizer.add_param_group({"params": [net.module[0].weight]})
    for number in range(4):
        pair.step(drawn(5, 4, step=number))
        pair.zero.zero_grad()
        pair.plain.zero_grad()
    assert len(pair.optimizer.param_groups) == len(pair.optimizer.optim.param_groups) == 2


@ranks(2)
def test_a_closure_is_called_once_with_gradients(rank: int) -> None:
    pair = Pair(mlp(4, 8, 2))
    calls, losses = [], []
    for net, optimizer in pair.each():

        def closure(net: Any = net, optimizer: Any = optimizer) -> Any:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = squares(net(drawn(5, 4)))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    assert calls == [True, True]
    assert torch.equal(*losses)
    pair.check()


@ranks(2)
def test_a_second_optimizer_is_refused_while_the_first_holds_gradients() -> None:
    net = wrap(mlp(4, 8, 8, 2))
    first = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        net.zero_grad()
        squares(net(drawn(5, 4))).backward()
    with pytest.raises(
        (ValueError, RuntimeError),
        match=r"earlier ZeroRedundancyOptimizer still holds gradients of '",
    ):
        ZeroRedundancyOptimizer([*net.parameters()][:2], torch.optim.SGD, lr=0.1)
    first.step()
    _second = ZeroRedundancyOptimizer([*net.parameters()][:2], torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="a newer ZeroRedundancyOptimizer"):
        first.step()
