"""Steps of ``ZeroRedundancyOptimizer``, compared with the plain optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_replicated import Pair, owner_of
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from modules import OnDemand, linears, mlp
from training import counted, drawn, squares, train_step, wrap

from tritonddp import ZeroRedundancyOptimizer

# Classes of optimizers, with their options.
CLASSES: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
if hasattr(torch.optim, "Muon"):  # it requires whole matrices
    CLASSES["Muon"] = torch.optim.Muon, {}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("transport", ["auto", "process_group"])
@ranks(2)
def test_the_values_are_those_of_the_plain_optimizer(transport: str, kind: str) -> None:
    optimizer_class, options = CLASSES[kind]
    net = linears(4, 16, 16, 2, bias=False) if kind == "Muon" else mlp(4, 16, 16, 8, 2)
    pair = Pair(net, optimizer_class, wrapper={"transport": transport}, lr=0.01, **options)
    for number in range(8):
        pair.step(drawn(5, 4, step=number))


@ranks(2)
def test_an_unused_parameter_keeps_its_value_and_has_no_state(rank: int) -> None:
    pair = Pair(OnDemand(4, 8), wrapper={"find_unused_parameters": True})
    before = pair.zero.module.unused.weight.clone()
    for number in range(5):
        pair.step(drawn(3, 4, step=number), extra=number > 2)
    assert_same_bits(pair.zero.module.unused.weight.detach(), before)
    pair.optimizer.consolidate_state_dict()
    if rank == 0:
        theirs = pair.oracle.state_dict()["state"]
        assert sorted(pair.optimizer.state_dict()["state"]) == sorted(theirs)


@ranks(3)
def test_the_wrapper_may_have_a_part_of_the_ranks(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    net = wrap(mlp(4, 8, 2), process_group=group)
    plain = wrap(mlp(4, 8, 2), process_group=group)
    plain.load_state_dict(net.state_dict())
    ours = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, group, lr=0.1)
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number in range(4):
        for each, optimizer in ((net, ours), (plain, oracle)):
            train_step(each, drawn(5, 4, step=number))
            optimizer.step()
        assert_same_bits(list(net.parameters()), list(plain.parameters()))
    ours.consolidate_state_dict(1)
    if group.rank() == 1:
        assert ours.state_dict()["state"].keys() == oracle.state_dict()["state"].keys()


class Failing(torch.optim.AdamW):
    """Its step fails if ``fails`` is set."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("on purpose")
        return super().step(closure)


@ranks(2)
def test_a_step_after_one_that_failed_makes_the_ranks_equal(rank: int) -> None:
    pair = Pair(mlp(4, 8, 8, 2), Failing)
    for number in range(3):
        pair.step(drawn(5, 4, step=number))
    train_step(pair.zero, drawn(5, 4))
    inner: Any = pair.optimizer.optim
    inner.fails = True
    with pytest.raises(ArithmeticError):
        pair.optimizer.step()
    inner.fails = False
    pair.optimizer.step()
    assert_same_on_all_ranks(list(pair.zero.parameters()))


@ranks(2, 3)
def test_the_state_of_a_rank_is_an_even_share_and_one_parameter(rank: int) -> None:
    net = wrap(mlp(7, 90, 3, 50, 50, 50, 2))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW)
    for number in range(2):
        train_step(net, drawn(5, 7, step=number))
        optimizer.step()
    size = dist.get_world_size()
    total = sum(param.numel() for param in net.parameters())
    largest = max(param.numel() for param in net.parameters())
    mine = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert 0 < mine <= total / size + largest
    owned = [param for param in net.parameters() if owner_of(optimizer, param) == rank]
    assert set(optimizer.state) == set(owned)
    assert sum(gather(mine)) == total


@ranks(2)
def test_check_sync_compares_values_and_skips_owned_gradients(rank: int) -> None:
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
    """Gradients and values each take half of the bytes of an all-reduce."""
    module = linears(*[256] * 13, bias=False)
    pair = Pair(module, torch.optim.SGD, wrapper={"transport": "process_group"}, lr=1e-6)
    sent = []
    for net, optimizer in pair.each():
        for number in range(4):
            train_step(net, drawn(5, 256, step=number))
            optimizer.step()
        optimizer.zero_grad()
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
