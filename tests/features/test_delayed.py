"""``delay_all_reduce_named_params``: some gradients are sent last, and wait for another one."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, in_rings, ranks, recorded_collectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, items: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        return self.second(self.first(self.table(items) + shift).tanh()).square().sum()


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


def items() -> Tensor:
    return torch.arange(3) + dist.get_rank()


def delaying(cls: Any, module: Tower, names: list[str], until: Tensor, **options: Any) -> Any:
    delayed = [(name, param) for name, param in module.named_parameters() if name in names]
    return cls(
        module,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=until,
        **options,
    )


ALL = [name for name, _ in Tower().named_parameters()]


@ranks(2)
def test_the_gradients_of_stock() -> None:
    """(Stock cannot delay all: it looks for the device of those that are left.)"""
    names = ["second.weight", "second.bias"]
    module = tower()
    ours = delaying(DistributedDataParallel, module, names, module.table.weight)
    module = tower()
    stock = delaying(Stock, module, names, module.table.weight)
    for step in range(4):
        ours(items()).backward()
        stock(items()).backward()
        dist.barrier()  # stock does not wait for the delayed ones
        for (name, param), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
            assert_same_bits(param.grad, other.grad, f"step {step}: {name}")
        for wrapped in ours, stock:
            wrapped.zero_grad()


def train(net: Any, module: Tower) -> list[Tensor | None]:
    grads: list[Tensor | None] = []
    for step in range(5):
        if step == 2:
            with net.no_sync():
                net(items()).backward()
        if step == 3:  # the delayed ones are unused on one rank
            loss = net(items())
            loss = module.table(items()).sum() if dist.get_rank() else loss
            loss.backward()
        elif step == 4:  # and on both
            net(items())  # arms the reduction
            module.table(items()).sum().backward()
        else:
            net(items()).backward()
        grads += [None if param.grad is None else param.grad.clone() for param in net.parameters()]
        net.zero_grad()
    return grads


@VIEW
@pytest.mark.parametrize("names", [["first.weight", "second.weight"], ALL], ids=["some", "all"])
@ranks(2)
def test_the_same_gradients_as_without_delay(names: list[str], view: bool) -> None:
    module = tower()
    options: dict[str, Any] = {"gradient_as_bucket_view": view, "bucket_cap_mb": 1e-4}
    net = delaying(DistributedDataParallel, module, names, module.first.bias, **options)
    grads = train(net, module)
    assert set(net.reducer.buckets[-1].names) == set(names)
    module = tower()
    expected = train(DistributedDataParallel(module, **options), module)
    for number, (grad, want) in enumerate(zip(grads, expected, strict=True)):
        assert_same_bits(grad, want, f"gradient {number}")


@pytest.mark.parametrize("reached", [True, False])
@ranks(2)
def test_sent_when_the_other_gradient_is_there(reached: bool) -> None:
    """Here it is one of a parameter outside the module, which comes last of all."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    outside = nn.Parameter(torch.ones(4))
    net = delaying(in_rings, module, ["2.weight", "2.bias"], outside)
    net(outside * 1).sum().backward()
    assert [len(bucket.params) for bucket in net.reducer.buckets] == [2, 2]
    sent: list[int] = []
    with recorded_collectives() as calls:
        inputs = outside * 1 if reached else torch.ones(4, requires_grad=True) * 1
        inputs.register_hook(lambda _: sent.append(len(calls)))  # all others are there
        net(inputs).sum().backward()
    assert sent == [1 if reached else 2]
    buckets = net.reducer.buckets
    assert list(map(id, (tensor for _, tensor in calls))) == [id(b.flat.data) for b in buckets]


@ranks(1)
def test_the_other_parameter_does_not_keep_the_wrapper() -> None:
    shift, module = nn.Parameter(torch.ones(())), tower()
    net = delaying(DistributedDataParallel, module, ["second.bias"], shift)
    reducer = weakref.ref(net.reducer)
    del net, module
    gc.collect()
    assert reducer() is None
    assert not shift._post_accumulate_grad_hooks  # type: ignore[attr-defined]


@ranks(2)
def test_ranks_that_delay_other_parameters_are_told() -> None:
    module = tower()
    names = [["second.bias"], ["first.bias"]][dist.get_rank()]
    with pytest.raises(RuntimeError, match="delayed"):
        delaying(DistributedDataParallel, module, names, module.table.weight)


@ranks(1)
def test_copies_are_told_from_the_parameters_themselves() -> None:
    module = tower()
    with pytest.raises(ValueError, match=r"none of the wrapped module's: second\.bias"):
        DistributedDataParallel(
            module,
            delay_all_reduce_named_params=[("second.bias", copy.deepcopy(module.second.bias))],
            param_to_hook_all_reduce=module.table.weight,
        )
