"""Accumulation, unused and frozen parameters, beside the plain optimizer."""

import pytest
import torch
import torch.distributed as dist
from beside_replicated import TRANSPORTS, Pair
from distributed import assert_same_bits, ranks
from modules import OnDemand, mlp
from torch import nn
from training import drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer


@ranks(2)
def test_a_local_backward_on_top_of_a_mean_is_refused(rank: int) -> None:
    net = wrap(mlp(4, 8, 8, 2))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for number in range(3):
        squares(net(drawn(3, 4, step=number))).backward()
    with net.no_sync():
        squares(net(drawn(3, 4))).backward()
    optimizer.step()  # with the mean, and what the owner has added
    with pytest.raises(RuntimeError, match=r"ZeroRedundancyOptimizer cannot reduce .* local"):
        squares(net(drawn(3, 4))).backward()
    optimizer.zero_grad()
    squares(net(drawn(3, 4))).backward()


# Backwards whose first gradient is there before they come to an output of the module, if they do.
LATE = {
    "a temperature": lambda net, x: (squares(net(x)) * net.module.temperature.exp()).backward(),
    "a dropped forward": lambda net, x: [net(x), squares(net.module(x)).backward()],
    "on request": lambda net, x: [squares(net.module(x)).backward(), net.reduce_gradients()],
}


@pytest.mark.parametrize("way", LATE)
@ranks(2, views=True)
def test_a_gradient_that_comes_before_its_backward_is_noticed_is_no_mean(
    view: bool, way: str
) -> None:
    module = mlp(4, 8, 2)
    module.temperature = nn.Parameter(torch.ones(()))
    pair = Pair(module, wrapper={"gradient_as_bucket_view": view})
    for number in range(3):
        for net, _ in pair.each():
            LATE[way](net, drawn(5, 4, step=number))
        pair.end(f"step {number}")


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, 3)
def test_a_parameter_that_nobody_uses_keeps_its_value_and_has_no_state(transport: str) -> None:
    pair = Pair(
        OnDemand(4, 8),
        wrapper={**TRANSPORTS[transport], "find_unused_parameters": True},
        tolerance=None if dist.get_world_size() == 2 else {"rtol": 1e-2, "atol": 1e-2},
    )
    before = pair.zero.module.unused.weight.clone()
    for number in range(5):
        pair.step(drawn(3, 4, step=number), extra=number > 2)
    assert_same_bits(pair.zero.module.unused.weight.detach(), before)
    pair.optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        theirs = pair.oracle.state_dict()["state"]
        assert sorted(pair.optimizer.state_dict()["state"]) == sorted(theirs)
