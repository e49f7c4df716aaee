"""Copies of a wrapper, saved wrappers, checkpoints of the module, and another process group."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import (
    assert_same_bits,
    assert_same_on_all_ranks,
    ranks,
    recorded_collectives,
)
from modules import by_pickle, by_torch_save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as Stock
from training import assert_right_step, breaking_off, drawn, train_step, wrap

from tritonddp import DistributedDataParallel


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def batch(seed: int) -> Tensor:
    return drawn(5, 4, step=seed)


def assert_averages(net: nn.Module, *seeds: int) -> None:
    for seed in seeds:
        assert_right_step(net, batch(seed))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, by_torch_save])
@ranks(2)
def test_a_copy_has_the_options_of_its_original(rank: int, make_copy: Callable[[Any], Any]) -> None:
    model = layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    net = DistributedDataParallel(
        model,
        bucket_cap_mb_list=[0.00001, 3],
        find_unused_parameters=False,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )
    net.require_backward_grad_sync = False
    other = make_copy(net)
    assert not other.require_backward_grad_sync
    assert not other.will_sync_module_buffers()
    assert other.bucket_bytes_cap_list == net.bucket_bytes_cap_list == [10, 3 * 2**20]
    other.require_backward_grad_sync = True
    other(batch(0)).sum().backward()
    memory = {param.grad.untyped_storage().data_ptr() for param in other.parameters()}
    assert len(memory) == len(other.reducer.buckets) + 1, "views of the buckets"
    assert_same_on_all_ranks([other.module[2].weight.grad])
    other.module[2].bias.grad.fill_(rank)
    other(batch(1))
    other.module[0](batch(1)).sum().backward()
    assert other.module[2].bias.grad.eq(rank).all(), "ignored"
    with pytest.raises(RuntimeError, match="finished reduction"):
        other(batch(1))


@ranks(2)
def test_copies_on_one_rank_only_do_not_disturb_the_others(rank: int) -> None:
    net = DistributedDataParallel(layers())
    assert_averages(net, 0)
    kept = [copy.deepcopy(net), by_pickle(net)] if rank == 1 else []
    for each in kept:
        each.eval()
        with torch.no_grad():
            each.module(batch(0))
    assert_averages(net, 1)
    late = DistributedDataParallel(layers())
    assert_averages(late, 2)
    # Copies made by all ranks match, although one rank has made other copies before.
    assert_averages(copy.deepcopy(net), 3)


@ranks(2)
def test_a_wrapper_of_another_group_cannot_be_copied_as_in_stock() -> None:
    group = dist.new_group([0, 1])
    net = DistributedDataParallel(layers(), process_group=group)
    expected = (
        "DDP Pickling/Unpickling are only supported when using DDP with the default process group"
    )
    for make_copy in (copy.deepcopy, pickle.dumps, by_torch_save):
        with pytest.raises(RuntimeError, match=expected) as caught:
            make_copy(net)
        assert "wrap that again" in str(caught.value)
    assert_averages(net, 0)


# The state of the module


@ranks(2)
def test_get_state_dict_returns_the_names_of_the_module() -> None:
    source, target = DistributedDataParallel(layers()), Stock(layers())
    optimizer = torch.optim.Adam(source.parameters(), lr=0.1)
    train_step(source, batch(0))
    optimizer.step()
    model_state, optimizer_state = get_state_dict(source, optimizer)
    assert list(model_state) == list(source.module.state_dict()), "without `module.`"
    other = torch.optim.Adam(target.parameters(), lr=0.1)
    set_state_dict(target, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_same_bits(target.state_dict(), source.state_dict())
    for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
        assert_same_bits(other.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])


# Other ranks


@ranks(3)
def test_a_wrapper_may_get_another_process_group(rank: int) -> None:
    net = wrap(layers(), broadcast_buffers=False)
    for seed in range(2):
        train_step(net, batch(seed))
    two = dist.new_group([0, 2])
    with recorded_collectives() as calls:
        net._update_process_group(two)
    assert not calls.on_the_group
    group = dist.group.WORLD if rank == 1 else two
    assert net.process_group is group
    if rank != 1:
        for seed in range(2, 5):
            alone = copy.deepcopy(net.module)
            train_step(net, batch(seed))
            train_step(alone, batch(seed))
            for param, own in zip(net.parameters(), alone.parameters(), strict=True):
                total = own.grad.clone()
                dist.all_reduce(total, group=two)
                torch.testing.assert_close(param.grad, total / 2)
    # With all ranks again.
    net._update_process_group(dist.group.WORLD)
    assert_averages(net, 7, 8)


@ranks(2)
def test_a_backward_that_broke_off_does_not_follow_a_wrapper_into_another_group() -> None:
    net = DistributedDataParallel(layers())
    train_step(net, batch(0))
    with breaking_off(net.module[0].weight):
        net(batch(1)).sum().backward()
    group, former = dist.new_group([0, 1]), net.reducer  # which a program may keep
    with recorded_collectives() as calls:
        net._update_process_group(group)
        assert not calls, "it would wait for ranks that have ended"
    net.zero_grad()
    assert_averages(net, 2)
    assert former.counters.reductions == 2, "the former reducer does not reduce"
