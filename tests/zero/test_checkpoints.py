"""``consolidate_state_dict()`` gives the state of the plain optimizer."""

import copy

import pytest
import torch
from beside_replicated import Pair
from distributed import assert_same_bits, ranks
from modules import mlp
from training import drawn


@ranks(2, 3)
def test_the_state_is_that_of_the_plain_optimizer(rank: int) -> None:
    """The state contains the names of the parameters."""
    pair = Pair(mlp(4, 8, 8, 2), params=lambda net: net.named_parameters())
    for number in range(4):
        pair.step(drawn(5, 4, step=number))
    optimizer = pair.optimizer
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=rank\)"):
        optimizer.state_dict()
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.consolidate_state_dict(5)
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        mine, plain = optimizer.state_dict(), pair.oracle.state_dict()
        assert mine["param_groups"] == plain["param_groups"]
        assert_same_bits(mine["state"], plain["state"])
    state = copy.deepcopy(pair.oracle.state_dict())
    for _, each in pair.each():
        each.load_state_dict(copy.deepcopy(state))
    pair.step(drawn(5, 4, step=5))
    with pytest.raises(RuntimeError, match="consolidate"):
        optimizer.state_dict()
    other = torch.optim.AdamW(mlp(4, 8, 2).parameters())
    with pytest.raises(ValueError, match="different"):
        optimizer.load_state_dict(other.state_dict())
    pair.step(drawn(5, 4, step=6))


@ranks(1)
def test_hooks_change_what_is_saved_and_loaded(rank: int) -> None:
    optimizer = Pair(mlp(4, 8, 2)).optimizer
    optimizer.consolidate_state_dict()
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "epoch": 7})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "epoch": 8})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state["epoch"] == 7
    assert calls == ["saving", "loaded"]
