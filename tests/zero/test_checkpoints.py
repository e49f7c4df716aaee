"""The state of all ranks in one dictionary, for any number of ranks and the plain optimizer."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_replicated import Pair
from distributed import assert_same_bits, ranks, run_ranks
from modules import mlp
from torch import nn
from training import drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer

WIDTHS = 4, 8, 8, 2
CLASSES: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
}


def module() -> nn.Module:
    torch.manual_seed(3)
    return mlp(*WIDTHS)


def assert_same_state(one: Any, other: Any) -> None:
    """Of two ``state_dict()``s, bit for bit."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in other["state"].items():
        assert_same_bits(one["state"][number], state, str(number))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("to", [0, 1])
@ranks(2, 3)
def test_the_state_is_that_of_the_plain_optimizer(rank: int, to: int, kind: str) -> None:
    optimizer_class, options = CLASSES[kind]
    pair = Pair(module(), optimizer_class, **options)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for _, o in pair.each()]
    for number in range(4):
        pair.step(drawn(5, 4, step=number))
        for each in schedulers:
            each.step()
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=rank\)"):
        pair.optimizer.state_dict()
    pair.optimizer.consolidate_state_dict(to)
    if rank == to:
        assert_same_state(pair.optimizer.state_dict(), pair.oracle.state_dict())
        saved = copy.deepcopy(pair.optimizer.state_dict())
    else:
        with pytest.raises(RuntimeError, match="consolidate"):
            pair.optimizer.state_dict()
    pair.step(drawn(5, 4, step=5))
    with pytest.raises(RuntimeError, match="consolidate"):
        pair.optimizer.state_dict()
    if rank == to:  # steps do not change what was gathered
        fresh = optimizer_class(module().parameters(), **options)
        fresh.load_state_dict(saved)
        assert_same_state(fresh.state_dict(), saved)


def trained(steps: int, saved: Any = None, plain: bool = False) -> Any:
    """Train with the same inputs on all ranks, from a checkpoint on; return one from rank 0."""
    net = wrap(module())
    kind = torch.optim.AdamW
    params = net.parameters()
    optimizer: Any = (
        kind(params, lr=0.05) if plain else ZeroRedundancyOptimizer(params, kind, lr=0.05)
    )
    begin = 0
    if saved is not None:
        begin, values, state = saved
        net.module.load_state_dict(values)
        optimizer.load_state_dict(state)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2) if saved is None else None
    for number in range(begin, begin + steps):
        squares(net(drawn(4, 4, step=number, rank=0))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    if not plain:
        optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        return begin + steps, net.module.state_dict(), optimizer.state_dict()
    return None


@pytest.mark.long
@pytest.mark.parametrize(
    "worlds",
    [
        [(4, False), (2, False), (1, False), (4, False)],
        [(4, False), (2, True), (4, False)],
        [(2, True), (4, False), (1, True)],
    ],
    ids=["ranks", "to plain", "from plain"],
)
def test_training_goes_on_at_another_number_of_ranks(worlds: Any) -> None:
    """At 1, 2 and 4 ranks the means of alike gradients have the same bits."""
    saved = None
    for size, plain in worlds:
        saved = run_ranks(trained, size, 3, saved, plain)[0]
    count, values, state = run_ranks(trained, 1, 3, None, True)[0]
    for _ in worlds[1:]:
        count, values, state = run_ranks(trained, 1, 3, (count, values, state), True)[0]
    assert saved is not None
    assert saved[0] == count
    assert_same_bits(saved[1], values)
    assert_same_state(saved[2], state)


@pytest.mark.parametrize("kind", CLASSES)
@ranks(3)
def test_a_state_is_loaded_and_saved_as_it_was(rank: int, kind: str) -> None:
    optimizer_class, options = CLASSES[kind]
    plain = module()
    oracle = optimizer_class(plain.parameters(), **options)
    for number in range(3):
        squares(plain(drawn(5, 4, step=number, rank=0))).backward()
        oracle.step()
    state = copy.deepcopy(oracle.state_dict())
    net = wrap(module())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class, **options)
    optimizer.load_state_dict(state)
    assert_same_state(state, oracle.state_dict())  # it is not changed
    optimizer.consolidate_state_dict(2)
    if rank == 2:
        assert_same_state(optimizer.state_dict(), state)


@ranks(1)
def test_hooks_run_as_those_of_the_plain_optimizer(rank: int) -> None:
    pair = Pair(module())
    pair.step(drawn(5, 4))
    pair.optimizer.consolidate_state_dict()
    seen: dict[Any, list[Any]] = {}
    for _, optimizer in pair.each():
        calls: list[Any] = []
        seen[optimizer] = calls

        def note(what: str, calls: list[Any] = calls) -> Any:
            def hook(_: Any, *states: Any) -> None:
                calls.append((what, [sorted(each) for each in states]))

            return hook

        def changed(_: Any, state: Any) -> Any:
            return {**state, "epoch": 7}

        def halved(_: Any, state: Any) -> Any:
            assert state.pop("epoch") == 7
            options, *others = state["param_groups"]
            return {**state, "param_groups": [{**options, "lr": options["lr"] / 2}, *others]}

        optimizer.register_state_dict_pre_hook(note("before saving"))
        optimizer.register_state_dict_post_hook(changed)
        optimizer.register_state_dict_post_hook(note("after saving"))
        optimizer.register_load_state_dict_pre_hook(halved)
        optimizer.register_load_state_dict_pre_hook(note("before loading"))
        optimizer.register_load_state_dict_post_hook(note("after loading"))
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert state["epoch"] == 7  # the user's dictionary is left as it was
        assert optimizer.param_groups[0]["lr"] == state["param_groups"][0]["lr"] / 2
    mine, theirs = seen.values()
    assert mine == theirs
    assert len(mine) == 4
    pair.step(drawn(5, 4, step=1))


@ranks(2)
def test_a_state_of_other_groups_is_refused(rank: int) -> None:
    pair = Pair(module())
    other = torch.optim.AdamW(mlp(4, 8, 2).parameters())
    with pytest.raises(ValueError, match="different"):
        pair.optimizer.load_state_dict(other.state_dict())
    for number in range(2):
        pair.step(drawn(5, 4, step=number))


@ranks(2)
def test_consolidating_on_a_rank_that_is_none_is_an_error(rank: int) -> None:
    pair = Pair(module())
    for number in range(2):
        pair.step(drawn(5, 4, step=number))
    with pytest.raises((ValueError, RuntimeError)):
        pair.optimizer.consolidate_state_dict(2)
    pair.step(drawn(5, 4, step=2))
