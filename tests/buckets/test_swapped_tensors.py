"""A parameter whose tensor ``torch.utils.swap_tensors`` has swapped is an error that names it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from differential.actions.training import converting
from distributed import ranks
from modules import Layers
from torch import Tensor, nn
from training import assert_right_step, drawn, wrap

import tritonddp

SWAPPED = r"rank \d, step \d: .*swap_tensors.* of parameter 'layers\.%s\.%s'.*wrap the module again"


def swap(param: Tensor) -> None:
    param.grad = None
    torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone() * 0.5))


def swap_all(module: nn.Module) -> None:
    for param in module.parameters():
        swap(param)


def load(module: nn.Module) -> None:
    with converting("swap"):
        module.load_state_dict({k: v.clone() * 0.5 for k, v in module.state_dict().items()})


def batch(step: int) -> Tensor:
    return drawn(3, 4, step=step, dtype=torch.float64)


def wrapped(view: bool = False) -> tritonddp.DistributedDataParallel:
    """After a step."""
    ddp = wrap(Layers("abc").double(), view, bucket_cap_mb=1e-4)
    assert_right_step(ddp, batch(0))
    ddp.zero_grad()
    return ddp


@pytest.mark.parametrize("change", [swap_all, load])
@ranks(2, views=True)
def test_swapped_tensors_are_an_error_at_each_forward(change: Any, view: bool) -> None:
    ddp = wrapped(view)
    change(ddp.module.layers["b"])
    for context in (nullcontext(), ddp.no_sync()):
        with context, pytest.raises(RuntimeError, match=SWAPPED % ("b", r"\w+")):
            ddp(batch(1))
    with torch.no_grad():
        ddp(batch(1))
    module = ddp.module
    del ddp  # it holds nodes of the graph that torch has invalidated
    ddp = wrap(module, view, bucket_cap_mb=1e-4)
    for step in range(2, 4):
        assert_right_step(ddp, batch(step))


@ranks(2)
def test_tensors_outside_of_the_buckets_may_be_swapped() -> None:
    net = Layers("abc").double()
    frozen = net.layers["b"].requires_grad_(False)
    ddp = wrap(net, bucket_cap_mb=1e-4)
    assert_right_step(ddp, batch(0))
    for param in frozen.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone(), requires_grad=False))
    assert_right_step(ddp, batch(1))
    frozen.requires_grad_(True)
    assert_right_step(ddp, batch(2))


@ranks(2)
def test_backwards_name_swapped_tensors_too() -> None:
    ddp = wrapped()
    loss = ddp(batch(1)).sum()
    swap(ddp.module.layers["b"].bias)  # torch refuses a weight, which the graph holds
    for call in (loss.backward, lambda: ddp(batch(2))):
        with pytest.raises(RuntimeError, match=SWAPPED % ("b", "bias")):
            call()
    # Without a forward.
    net = tritonddp.replicate(Layers("abc").double())
    net(batch(0)).sum().backward()
    swap_all(net)
    with pytest.raises(RuntimeError, match=SWAPPED % (".", r"\w+")):
        net.layers["a"](batch(1)).sum().backward()
    ddp = wrapped()
    ddp(batch(1))  # the next backward is reduced
    swap_all(ddp.module)
    with pytest.raises(RuntimeError, match=SWAPPED % (".", r"\w+")):
        ddp.module.layers["a"](batch(1)).sum().backward()
