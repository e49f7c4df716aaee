"""Accumulation, unused and frozen parameters, beside the plain optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_replicated import TRANSPORTS, Pair
from distributed import assert_same_bits, ranks
from modules import Layers, OnDemand, mlp
from torch import nn
from training import drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, views=True)
def test_backwards_under_no_sync_accumulate(view: bool, transport: str) -> None:
    pair = Pair(mlp(4, 8, 8, 2), wrapper={**TRANSPORTS[transport], "gradient_as_bucket_view": view})
    for number in range(5):
        for net, _ in pair.each():
            with net.no_sync():
                for part in range(number % 3):
                    squares(net(drawn(3, 4, step=10 * number + part))).backward()
            squares(net(drawn(3, 4, step=10 * number + 9))).backward()
        if number:
            pair.check_gradients(f"step {number}")
        pair.end(f"step {number}", set_to_none=number % 2 == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, views=True)
def test_reduced_backwards_accumulate(view: bool, transport: str) -> None:
    """Two of them and no zero_grad() from one to the other, as with GANs."""
    pair = Pair(
        mlp(4, 8, 8, 2),
        torch.optim.SGD,
        wrapper={**TRANSPORTS[transport], "gradient_as_bucket_view": view},
        tolerance={"rtol": 1e-4, "atol": 1e-5},  # the mean is added before or after
        lr=0.01,
    )
    for number in range(4):
        for net, optimizer in pair.each():
            for part in range(2):
                squares(net(drawn(3, 4, step=10 * number + part))).backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.check(f"step {number}")


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


@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2, views=True)
def test_what_a_probe_leaves_behind_is_dropped(view: bool, set_to_none: bool) -> None:
    """A local backward on top of the mean, which zero_grad() then drops; others follow."""
    pair = Pair(
        mlp(4, 8, 8, 2),
        wrapper={"gradient_as_bucket_view": view},
        tolerance={"rtol": 1e-3, "atol": 1e-4},
        lr=0.01,
    )
    for number in range(4):
        for net, optimizer in pair.each():
            with net.no_sync():
                squares(net(drawn(3, 4, step=10 * number))).backward()
                optimizer.zero_grad(set_to_none)
                if number % 2:
                    squares(net(drawn(3, 4, step=10 * number + 1))).backward()
            squares(net(drawn(3, 4, step=10 * number + 2))).backward()
            optimizer.step()
        pair.check(f"step {number}")


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, views=True)
def test_layers_may_be_used_on_some_ranks_alone(rank: int, view: bool, transport: str) -> None:
    """Each of four layers, by one rank, all ranks, none; and so it is owned here or there."""
    used = [("abcd", "abcd"), ("a", "bcd"), ("bcd", "a"), ("ad", "ad"), ("c", "cb"), ("dcba",) * 2]
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    pair = Pair(Layers("abcd"), wrapper={**TRANSPORTS[transport], **options})
    for number, orders in enumerate([*used, *used]):
        for net, _ in pair.each():
            squares(net(drawn(3, 4, step=number), orders[rank])).backward()
        if number:
            pair.check_gradients(f"step {number}")
        pair.end(f"step {number}", set_to_none=number % 2 == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, views=True)
def test_what_only_a_local_backward_used_is_reduced(rank: int, view: bool, transport: str) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    pair = Pair(Layers("abcd"), wrapper={**TRANSPORTS[transport], **options})
    for number in range(6):
        for net, _ in pair.each():
            with net.no_sync():
                order = "abcd" if number == 0 else ("ab", "cd")[(rank + number) % 2]
                squares(net(drawn(3, 4, step=10 * number), order)).backward()
            squares(
                net(drawn(3, 4, step=10 * number + 1), "abcd" if number == 0 else "d")
            ).backward()
        if number:
            pair.check_gradients(f"step {number}")
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


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, views=True)
def test_a_frozen_layer_may_be_trained_later_and_frozen_again(view: bool, transport: str) -> None:
    module = mlp(4, 8, 8, 2)
    module[0].requires_grad_(False)
    pair = Pair(module, wrapper={**TRANSPORTS[transport], "gradient_as_bucket_view": view})
    for number in range(12):
        pair.step(drawn(5, 4, step=number))
        for net, _ in pair.each():
            net.module[0].requires_grad_(3 <= number < 8)
            net.module[2].requires_grad_(number != 5)


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, views=True)
def test_parameters_of_no_optimizer_have_their_gradient_on_all_ranks(
    view: bool, transport: str
) -> None:
    pair = Pair(
        mlp(4, 8, 8, 2),
        params=lambda net: [*net.module[0].parameters(), net.module[4].weight],
        wrapper={**TRANSPORTS[transport], "gradient_as_bucket_view": view},
    )
    for number in range(5):
        for net, _ in pair.each():
            squares(net(drawn(5, 4, step=number))).backward()
        if number:
            pair.check_gradients(f"step {number}")
            assert pair.zero.module[2].weight.grad is not None
        for net, optimizer in pair.each():
            with torch.no_grad():
                for param in [*net.module[2].parameters(), net.module[4].bias]:
                    param -= 0.1 * param.grad
            optimizer.step()
            net.zero_grad()
        pair.check(f"step {number}")


@ranks(2)
def test_steps_without_a_gradient_change_nothing(rank: int) -> None:
    pair = Pair(mlp(4, 8, 2))
    for number in range(4):
        for net, optimizer in pair.each():
            if number % 2:
                squares(net(drawn(5, 4, step=number))).backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.check(f"step {number}")


@ranks(2)
def test_several_steps_may_follow_one_backward(rank: int) -> None:
    pair = Pair(mlp(4, 8, 2))
    for number in range(4):
        for net, optimizer in pair.each():
            squares(net(drawn(5, 4, step=number))).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        pair.check(f"step {number}")


class Twice(nn.Module):
    """Calls a module twice: its parameters get two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(4, 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


@ranks(2)
def test_a_module_may_be_called_twice(rank: int) -> None:
    pair = Pair(Twice())
    for number in range(4):
        pair.step(drawn(5, 4, step=number))


@ranks(2)
def test_the_optimizer_may_be_made_after_some_steps(rank: int) -> None:
    """Then buckets exist already, and their order is known."""
    pair: Any = Pair.__new__(Pair)
    pair.tolerance = None
    pair.zero, pair.plain = wrap(mlp(4, 8, 8, 2)), wrap(mlp(4, 8, 8, 2))
    pair.plain.load_state_dict(pair.zero.state_dict())
    for number in range(3):
        for net in (pair.zero, pair.plain):
            net.zero_grad()
            squares(net(drawn(5, 4, step=number))).backward()
    pair.optimizer = ZeroRedundancyOptimizer(pair.zero.parameters(), torch.optim.AdamW, lr=0.1)
    pair.oracle = torch.optim.AdamW(pair.plain.parameters(), lr=0.1)
    for number in range(4):  # the first one steps down the gradients that were there
        for net, optimizer in pair.each():
            optimizer.step()
            optimizer.zero_grad()
            squares(net(drawn(5, 4, step=number))).backward()
        pair.check(f"step {number}")
        pair.check_gradients(f"step {number}")
