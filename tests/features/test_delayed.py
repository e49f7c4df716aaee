"""``delay_all_reduce_named_params``: some gradients are sent last, and wait for another one."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, in_rings, ranks, recorded_collectives
from modules import Layers, mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import delayed, filled, gradients, wrap

from tritonddp import DistributedDataParallel


def loss_of(net: Any) -> Tensor:
    return net(filled(2, 4)).square().sum()


@ranks(2)
def test_the_gradients_of_stock() -> None:
    """(Stock cannot delay all: it looks for the device of those that are left.)"""
    nets = []
    for cls in (DistributedDataParallel, Stock):
        torch.manual_seed(0)
        module = Layers("abc")
        names = "layers.c.weight", "layers.c.bias"
        nets.append(cls(module, **delayed(module, *names, until=module.layers["a"].weight)))
    for step in range(4):
        for net in nets:
            net.zero_grad()
            loss_of(net).backward()
        dist.barrier()  # stock does not wait for the delayed ones
        assert_same_bits(*map(gradients, nets), f"step {step}")


@pytest.mark.parametrize("reached", [True, False])
@ranks(2)
def test_sent_when_the_other_gradient_is_there(reached: bool) -> None:
    """Here it is one of a parameter outside the module, which comes last of all."""
    module, outside = mlp(4, 4, 4), nn.Parameter(torch.ones(4))
    net = in_rings(module, **delayed(module, "2.weight", "2.bias", until=outside))
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
    shift, module = nn.Parameter(torch.ones(())), Layers("abc")
    net = wrap(module, **delayed(module, "layers.c.bias", until=shift))
    reducer = weakref.ref(net.reducer)
    del net, module
    gc.collect()
    assert reducer() is None
    assert not shift._post_accumulate_grad_hooks  # type: ignore[attr-defined]


@ranks(2)
def test_ranks_that_delay_other_parameters_are_told(rank: int) -> None:
    module = Layers("abc")
    options = delayed(module, f"layers.{'bc'[rank]}.bias", until=module.layers["a"].weight)
    with pytest.raises(RuntimeError, match="delayed"):
        wrap(module, **options)


@ranks(1)
def test_copies_are_told_from_the_parameters_themselves() -> None:
    module = Layers("abc")
    options = delayed(copy.deepcopy(module), "layers.c.bias", until=module.layers["a"].weight)
    with pytest.raises(ValueError, match=r"none of the wrapped module's: layers\.c\.bias"):
        wrap(module, **options)
