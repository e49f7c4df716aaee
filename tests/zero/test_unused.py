"""Accumulation, unused and frozen parameters, beside the plain optimizer."""

import pytest
import torch
import torch.distributed as dist
from beside_replicated import TRANSPORTS, Pair
from distributed import assert_same_bits, ranks
from modules import OnDemand, mlp
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
