"""Values after steps of owners are those of the plain optimizer on all ranks."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside_replicated import TRANSPORTS, Pair, owner_of
from distributed import assert_same_on_all_ranks, ranks
from modules import Squares, linears, mlp
from torch import nn
from training import drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer
from tritonddp.zero.values import OwnedValues

# Classes of optimizers, with their options.
CLASSES: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "no momentum": (torch.optim.SGD, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
}
if hasattr(torch.optim, "Muon"):  # which looks at whole matrices, and takes nothing else
    CLASSES["Muon"] = torch.optim.Muon, {}
# The order in which gloo adds up numbers of three ranks depends on the collective.
ROUNDED = {"rtol": 1e-4, "atol": 1e-5}


def tolerance(transport: str) -> Any:
    """Of values, by this transport."""
    return ROUNDED if transport == "process group" and dist.get_world_size() > 2 else None


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, 3, views=True)
def test_the_values_are_those_of_the_plain_optimizer(view: bool, transport: str, kind: str) -> None:
    optimizer_class, options = CLASSES[kind]
    is_sharp = "Ad" in optimizer_class.__name__  # divides by the size of a gradient
    wrapper = {**TRANSPORTS[transport], "gradient_as_bucket_view": view}
    within = tolerance(transport)
    if within and is_sharp:
        within = {"rtol": 1e-2, "atol": 1e-2}
    net = linears(4, 16, 16, 2, bias=False) if kind == "Muon" else mlp(4, 16, 16, 8, 2)
    pair = Pair(net, optimizer_class, wrapper=wrapper, tolerance=within, lr=0.01, **options)
    for number in range(8):
        pair.step(drawn(5, 4, step=number))


@pytest.mark.parametrize("shapes", [[(3,)], [(40, 40)], [(2,), (3,)]], ids=["one", "huge", "two"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(3)
def test_there_may_be_fewer_parameters_than_ranks(transport: str, shapes: Any) -> None:
    pair = Pair(Squares(*shapes), torch.optim.AdamW, wrapper=TRANSPORTS[transport])
    clip = torch.nn.utils.clip_grad_norm_
    for number in range(4):
        for net, optimizer in pair.each():
            net(2 + number).backward()
            norm = clip(net.parameters(), 1.0)
            assert norm > 0
            optimizer.step()
            optimizer.zero_grad()
        pair.check(f"step {number}")


@ranks(1)
def test_a_world_of_one_steps_all(rank: int) -> None:
    pair = Pair(mlp(4, 8, 2))
    for number in range(4):
        pair.step(
            drawn(5, 4, step=number),
            between=lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
        )
    pair.optimizer.consolidate_state_dict()
    assert pair.optimizer.state_dict()["param_groups"] == pair.oracle.state_dict()["param_groups"]


@pytest.mark.parametrize("world", [(0, 2), (1, 2)])
@ranks(3)
def test_the_wrapper_may_have_a_part_of_the_ranks(rank: int, world: tuple[int, int]) -> None:
    group = dist.new_group(list(world))
    if rank not in world:
        return
    net = wrap(mlp(4, 8, 2), process_group=group)
    other = wrap(mlp(4, 8, 2), process_group=group)
    other.load_state_dict(net.state_dict())
    ours = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, group, lr=0.1)
    plain = torch.optim.AdamW(other.parameters(), lr=0.1)
    for number in range(4):
        for each, optimizer in ((net, ours), (other, plain)):
            squares(each(drawn(5, 4, step=number))).backward()
            optimizer.step()
            optimizer.zero_grad()
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
    ours.consolidate_state_dict(1)
    if group.rank() == 1:
        assert ours.state_dict()["state"].keys() == plain.state_dict()["state"].keys()


class Failing(torch.optim.AdamW):
    """A step that fails, if it is to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("on purpose")
        return super().step(closure)


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2)
def test_a_step_behind_one_that_failed_makes_the_ranks_equal(rank: int, transport: str) -> None:
    pair = Pair(mlp(4, 8, 8, 2), Failing, wrapper=TRANSPORTS[transport])
    for number in range(3):
        pair.step(drawn(5, 4, step=number))
    optimizer = pair.optimizer
    squares(pair.zero(drawn(5, 4))).backward()
    optimizer.optim.fails = True  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.optim.fails = False  # type: ignore[attr-defined]
    with (
        mock.patch.object(OwnedValues, "exchange", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        optimizer.step()
    optimizer.step()
    assert_same_on_all_ranks(list(pair.zero.parameters()))


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2, 3)
def test_the_state_of_a_rank_is_an_even_share_and_one_parameter(rank: int, transport: str) -> None:
    net = wrap(mlp(7, 90, 3, 50, 50, 50, 2), **TRANSPORTS[transport])
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW)
    for number in range(2):
        squares(net(drawn(5, 7, step=number))).backward()
        optimizer.step()
        optimizer.zero_grad()
    size = dist.get_world_size()
    total = sum(param.numel() for param in net.parameters())
    largest = max(param.numel() for param in net.parameters())
    states = optimizer.state.values()
    mine = sum(state["exp_avg"].numel() for state in states)
    assert 0 < mine <= total / size + largest
    owned = [param for param in net.parameters() if owner_of(optimizer, param) == rank]
    assert set(optimizer.state) == set(owned)
    counts: list[Any] = [None] * size
    dist.all_gather_object(counts, mine)
    assert sum(counts) == total
