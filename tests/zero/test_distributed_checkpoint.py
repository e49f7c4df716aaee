"""``torch.distributed.checkpoint``: each rank saves and loads what it owns."""

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside_replicated import Pair, owner_of
from distributed import assert_same_bits, ranks, run_ranks
from modules import mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from training import drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer

AdamW = torch.optim.AdamW
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)
ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def module(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(4, 8, 8, 2)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases, in another order than the module has them."""
    params = list(net.parameters())
    return [{"params": params[1::2], "weight_decay": 0.0}, {"params": params[::2], "lr": 0.02}]


def plain(net: nn.Module) -> Any:
    return AdamW(groups(net), lr=0.05)


def sharded(net: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups(net), AdamW, lr=0.05)


def train(net: Any, optimizer: Any, steps: range) -> None:
    """With the same inputs on all ranks."""
    for number in steps:
        squares(net(drawn(4, 4, step=number, rank=0))).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_checkpoint(one: Any, other: Any) -> None:
    """Of two full state dicts, bit for bit."""
    assert_same_bits(one["model"], other["model"])
    assert one["optim"]["param_groups"] == other["optim"]["param_groups"]
    assert_same_bits(one["optim"]["state"], other["optim"]["state"])


def taken_on(
    place: Path, count: int, options: StateDictOptions | None, kind: str, bare: bool
) -> Any:
    """Load checkpoint ``count`` of ``place``, train, save the next one; return both in full.

    Without any the first one is of a new run.
    """
    net = wrap(module(seed=3 if count == 0 else 7))
    optimizer = plain(net) if kind == "plain" else sharded(net)
    named = net.module if bare else net

    def checkpoint() -> Any:
        model, optim = get_state_dict(named, optimizer, options=options)
        return {"model": model, "optim": optim}

    def whole() -> Any:
        optim = get_optimizer_state_dict(named, optimizer, options=FULL)
        return copy.deepcopy({"model": dict(net.module.state_dict()), "optim": optim})

    loaded = None
    if count:
        content = checkpoint()
        dcp.load(content, checkpoint_id=place / str(count))
        set_state_dict(
            named,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optim"],
            options=options,
        )
        loaded = whole()
    train(net, optimizer, range(3 * count, 3 * count + 3))
    dcp.save(checkpoint(), checkpoint_id=place / str(count + 1))
    return loaded, whole()


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
def test_a_checkpoint_is_loaded_at_another_number_of_ranks(tmp_path: Path, options: Any) -> None:
    saved = None
    worlds = [(3, "sharded"), (2, "sharded"), (1, "plain"), (1, "sharded"), (3, "sharded")]
    for count, (size, kind) in enumerate(worlds):
        results = run_ranks(taken_on, size, tmp_path, count, options, kind, count % 2 == 1)
        for loaded, _ in results if saved is not None else []:
            assert_same_checkpoint(loaded, saved)
        saved = results[0][1]
        assert len(saved["optim"]["state"]) == 6


@ranks(3)
def test_a_rank_has_the_state_that_it_owns_or_all_of_it(rank: int) -> None:
    net = wrap(module())
    optimizer = sharded(net)
    train(net, optimizer, range(3))
    params = dict(net.module.named_parameters())
    owned = {name for name, param in params.items() if owner_of(optimizer, param) == rank}
    part = get_optimizer_state_dict(net, optimizer)
    assert part["state"].keys() == owned
    for name in owned:  # itself, as of other optimizers: dcp.load() writes to it
        assert part["state"][name]["exp_avg"] is optimizer.state[params[name]]["exp_avg"]
    full = get_optimizer_state_dict(net, optimizer, options=FULL)
    assert full["state"].keys() == params.keys()
    first = get_optimizer_state_dict(net, optimizer, options=ON_FIRST)
    assert first.keys() == (full.keys() if rank == 0 else set())
    if rank == 0:
        assert_same_bits(first["state"], full["state"])
    with pytest.raises(RuntimeError, match="consolidate"):  # of the optimizer itself, as ever
        optimizer.state_dict()
    # All ranks have all of it, or the first one.
    for options, content in ((FULL, full), (FROM_FIRST, full if rank == 0 else {})):
        other = wrap(module(seed=7))
        later = sharded(other)
        set_optimizer_state_dict(other, later, copy.deepcopy(content), options=options)
        for group in later.param_groups:
            group["betas"] = tuple(group["betas"])  # broadcast as a list, as of other optimizers
        loaded = get_optimizer_state_dict(other, later, options=FULL)
        assert loaded["param_groups"] == full["param_groups"]
        assert_same_bits(loaded["state"], full["state"])
    with pytest.raises(RuntimeError, match="Missing optimizer state"):  # a part is not all
        set_optimizer_state_dict(other, plain(other), part)


def without_first_gradient(net: Any, optimizer: Any) -> None:
    next(net.parameters()).grad = None


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Muon"])
@ranks(3)
def test_what_is_made_to_be_loaded_changes_no_parameter(rank: int, kind: str) -> None:
    """The last rank owns nothing. Later only the first one has state."""
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    torch.manual_seed(3)
    tall = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    pair = Pair(tall, getattr(torch.optim, kind), weight_decay=0.1, tolerance=tolerance)
    before = copy.deepcopy(dict(tall.state_dict()))
    for net, optimizer in pair.each():
        get_optimizer_state_dict(net, optimizer)
    assert_same_bits(dict(tall.state_dict()), before)
    for number in range(2):
        pair.step(drawn(5, 4, step=number, rank=0), between=without_first_gradient)
    mine, theirs = (
        get_optimizer_state_dict(net, optimizer, options=FULL) for net, optimizer in pair.each()
    )
    assert mine["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(mine["state"], theirs["state"], **tolerance)
    torch.manual_seed(4)
    again = Pair(copy.deepcopy(tall), getattr(torch.optim, kind), weight_decay=0.1)
    set_optimizer_state_dict(
        again.zero, again.optimizer, mine if rank == 0 else {}, options=FROM_FIRST
    )
    set_optimizer_state_dict(again.plain, again.oracle, theirs)
    torch.testing.assert_close(
        *(get_optimizer_state_dict(*each, options=FULL)["state"] for each in again.each()),
        **tolerance,
    )


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@ranks(2)
def test_copies_of_parameters_are_in_it(rank: int, kind: str) -> None:
    """Also those of an optimizer that has no other state."""

    def made(seed: int) -> tuple[Any, Any]:
        net = wrap(module(seed).bfloat16())
        optimizer_class = getattr(torch.optim, kind)
        return net, ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class, lr=1e-4, master_weights=True
        )

    def taken(net: Any, optimizer: Any) -> dict[str, Any]:
        model, optim = get_state_dict(net, optimizer, options=FLAT)
        return {"model": model, "optim": optim}

    def step(net: Any, optimizer: Any, number: int) -> None:
        squares(net(drawn(4, 4, step=number, dtype=torch.bfloat16))).backward()
        optimizer.step()
        optimizer.zero_grad()

    ours = made(3)
    for number in range(5):
        step(*ours, number)
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    dcp.save(taken(*ours), checkpoint_id=place[0])
    later = made(7)
    content = taken(*later)
    dcp.load(content, checkpoint_id=place[0])
    set_state_dict(
        *later, model_state_dict=content["model"], optim_state_dict=content["optim"], options=FLAT
    )
    for number in range(5, 25):
        step(*ours, number)
        step(*later, number)
    assert_same_bits(
        *(get_optimizer_state_dict(*each, options=FULL)["state"] for each in (ours, later))
    )
    if rank == 0:
        shutil.rmtree(place[0])
