"""A wrapper has stock's attributes and the documented methods; all else is the user's."""

import copy
from typing import Any

import pytest
import torch
from distributed import assert_same_bits, ranks
from docstring_examples import documented
from modules import forwarding
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel

# What a wrapper has and stock's has not; each is documented in docs/api.md.
ADDED = {
    *("check_sync", "comm_state_dict", "load_comm_state_dict", "metrics"),
    *("add_scalars", "reduced_scalars"),
    *("reduce_gradients", "request_stop", "should_stop", "weighted"),
}
# What stock's class has from torch 2.11, 2.13 and 2.15 on.
OF_LATER_STOCK = {
    "bucket_bytes_cap_list",
    *("batched_grad_copy", "forward_sync_buffers"),
    *("finalize_backward", "lazy_bucket_allocation", "require_manual_backward_finalization"),
    "should_finalize_after_backward",
}
# Arguments of stock's constructor that it keeps as attributes, and that have no text there either.
WITHOUT_TEXT = {
    "bucket_bytes_cap_list",
    *("batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"),
}
# Private attributes of an instance. (Stock's join hook sets the other two.)
PRIVATE = {"_ddp_state", "_authoritative_rank", "_divide_by_initial_world_size"}


@ranks(1)
def test_a_name_that_is_neither_stocks_nor_documented_is_not_on_the_wrapper() -> None:
    ours, stock = (kind(nn.Linear(2, 2)) for kind in (DistributedDataParallel, Stock))
    more = set(dir(ours)) - set(dir(stock))
    assert {name for name in more if not name.startswith("_")} - OF_LATER_STOCK == ADDED
    assert set(vars(ours)) - set(dir(stock)) <= PRIVATE | OF_LATER_STOCK
    missing = set(dir(stock)) - set(dir(ours))
    assert not [name for name in missing if not name.startswith("_")]


def test_what_is_added_is_in_the_reference() -> None:
    shown = {name.rpartition(".")[2] for name in documented() if "DataParallel." in name}
    assert shown >= ADDED | OF_LATER_STOCK - WITHOUT_TEXT


INSIDE = """
    config group sync core caps traced buffer_sync state_broadcast device check_finite window
    figures _window _low _figures comm_hook_name wrapped_modules _buffer_hook _is_sliced
"""
NAMES = [*INSIDE.split(), *sorted(ADDED)]


def net() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    module.config = {"hidden": 3}
    return module


def step(ddp: nn.Module, number: int) -> list[Tensor]:
    ddp.zero_grad()
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
    ddp(batch).pow(2).mean().backward()
    return [param.grad.clone() for param in ddp.parameters()]


def itself(ddp: Any) -> Any:
    return ddp


def beside_a_shallow_copy(ddp: Any) -> Any:
    other = copy.copy(ddp)
    assert other._ddp_state is not ddp._ddp_state
    return ddp


@pytest.mark.parametrize("make", [itself, copy.deepcopy, copy.copy, beside_a_shallow_copy])
@ranks(2)
def test_a_user_may_set_any_attribute_and_training_goes_on(make: Any) -> None:
    ddp, plain = (DistributedDataParallel(net(), metrics=True) for _ in range(2))
    for name in NAMES:
        setattr(ddp, name, {"set by": "the user"})
    ddp = make(ddp)
    for number in range(3):
        with ddp.no_sync(), plain.no_sync():
            step(ddp, 10 + number)
            step(plain, 10 + number)
        assert_same_bits(step(ddp, number), step(plain, number))
    assert all(getattr(ddp, name) == {"set by": "the user"} for name in NAMES)


@ranks(1)
def test_a_subclass_that_hands_on_to_the_module_finds_what_is_the_modules() -> None:
    module = net()
    for name in NAMES:
        if name not in ADDED and name != "device":
            setattr(module, name, object())
    ddp = forwarding(DistributedDataParallel)(module)
    step(ddp, 0)
    for name in NAMES:
        if name not in ADDED and name != "device":
            assert getattr(ddp, name) is getattr(module, name), name
