"""``delay_all_reduce_named_params``: some gradients are sent last."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from modules import Layers
from torch import Tensor
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
    with pytest.raises(ValueError, match=r"none of the wrapped module's: 'layers\.c\.bias'"):
        wrap(module, **options)
