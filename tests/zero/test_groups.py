"""What programs do with an optimizer: groups, schedulers, closures, hooks, its state."""

import copy
import pickle
from typing import Any

import pytest
import torch
from beside_replicated import Pair, owner_of
from distributed import assert_same_bits, ranks
from modules import mlp
from training import drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer


@ranks(2)
def test_the_learning_rate_may_be_a_tensor(rank: int) -> None:
    module = mlp(4, 8, 8, 2)
    other = copy.deepcopy(module)
    nets = wrap(module), wrap(other)
    rates = torch.tensor(0.1), torch.tensor(0.1)
    mine = ZeroRedundancyOptimizer(nets[0].parameters(), torch.optim.Adam, lr=rates[0])
    theirs = torch.optim.Adam(nets[1].parameters(), lr=rates[1])
    for number in range(4):
        for net, rate, optimizer in zip(nets, rates, (mine, theirs), strict=True):
            squares(net(drawn(5, 4, step=number))).backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.mul_(0.5)
        assert_same_bits(list(nets[0].parameters()), list(nets[1].parameters()))


@ranks(2)
def test_parameters_may_come_with_their_names(rank: int) -> None:
    pair = Pair(mlp(4, 8, 2), params=lambda net: net.named_parameters())
    for number in range(3):
        pair.step(drawn(5, 4, step=number))
    pair.optimizer.consolidate_state_dict(0)
    if rank == 0:
        mine, theirs = pair.optimizer.state_dict(), pair.oracle.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        pair.oracle.load_state_dict(mine)
    state = copy.deepcopy(pair.oracle.state_dict())
    for names in (["a", "b", "c", "d"], None):  # those that are loaded, else those that it has
        state["param_groups"][0]["param_names"] = names
        if names is None:
            del state["param_groups"][0]["param_names"]
        for net, optimizer in pair.each():
            optimizer.param_groups[0]["note"] = "not in the checkpoint"
            optimizer.load_state_dict(copy.deepcopy(state))
            (group,) = optimizer.param_groups
            assert group["param_names"] == ["a", "b", "c", "d"]
            assert group["params"] == list(net.parameters())
        assert pair.optimizer.param_groups[0].keys() == pair.oracle.param_groups[0].keys()
    pair.step(drawn(5, 4, step=3))


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
    for number in range(4):
        losses = []
        for net, optimizer in pair.each():
            calls = []

            def closure(
                net: Any = net, optimizer: Any = optimizer, calls: Any = calls, number: int = number
            ) -> Any:
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                loss = squares(net(drawn(5, 4, step=number)))
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
            assert calls == [True]
        assert torch.equal(*losses)
        pair.check(f"step {number}")


@ranks(2)
def test_hooks_of_a_step_run_once(rank: int) -> None:
    pair = Pair(mlp(4, 8, 2))
    seen: dict[Any, list[str]] = {}
    for net, optimizer in pair.each():
        optimizer.register_step_pre_hook(lambda o, *_: seen.setdefault(type(o), []).append("pre"))
        optimizer.register_step_post_hook(lambda o, *_: seen.setdefault(type(o), []).append("post"))

        def halve(_: Any, args: Any, kwargs: Any, net: Any = net) -> None:
            with torch.no_grad():
                for param in net.parameters():
                    param.mul_(0.5)

        optimizer.register_step_post_hook(halve)
    for number in range(3):
        pair.step(drawn(5, 4, step=number))
    assert [*map(len, seen.values())] == [6, 6]
    assert {*map(tuple, seen.values())} == {("pre", "post") * 3}


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@ranks(2)
def test_a_copy_of_the_wrapper_is_an_ordinary_one(rank: int, how: str) -> None:
    pair = Pair(mlp(4, 8, 2))
    for number in range(3):
        pair.step(drawn(5, 4, step=number))
    is_copied = how == "deepcopy"
    other = copy.deepcopy(pair.zero) if is_copied else pickle.loads(pickle.dumps(pair.zero))
    plain = copy.deepcopy(pair.plain)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (other, plain)]
    for number in range(4):
        for net, optimizer in zip((other, plain), optimizers, strict=True):
            squares(net(drawn(5, 4, step=number))).backward()
            optimizer.step()
        for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
            assert_same_bits(mine, theirs, f"step {number}")
            assert_same_bits(mine.grad, theirs.grad, f"step {number}")
        for optimizer in optimizers:
            optimizer.zero_grad()
        pair.step(drawn(5, 4, step=10 + number))
    again = ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, lr=0.1)
    assert {owner_of(again, param) for param in other.parameters()} == {0, 1}


@ranks(2)
def test_a_constructor_that_raised_may_be_called_again(rank: int) -> None:
    net = wrap(mlp(4, 8, 2))
    with pytest.raises(ValueError, match="learning rate"):
        ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=-1)
    with pytest.raises(TypeError):
        ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, learning_rate=1)
    squares(net(drawn(5, 4))).backward()
    squares(net(drawn(5, 4))).backward()
    assert all(param.grad is not None for param in net.parameters())
    ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1)


@ranks(2)
def test_one_that_leaves_out_gradients_which_only_their_owners_have_is_refused() -> None:
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
    for _ in range(2):  # before zero_grad(), which the loop of the next stage calls, and after it
        ZeroRedundancyOptimizer([*net.parameters()][:2], torch.optim.SGD, lr=0.1)
        net.zero_grad()
