"""A parameter whose tensor ``torch.utils.swap_tensors`` has swapped is an error that names it."""

from collections.abc import Callable
from contextlib import nullcontext

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


def swap_each_other(module: nn.Module) -> None:
    one, other = module.layers["a"].weight, module.layers["b"].weight
    one.grad = other.grad = None
    torch.utils.swap_tensors(one, other)


def swap_with_another_shape(module: nn.Module) -> None:
    torch.utils.swap_tensors(module.layers["b"].weight, nn.Parameter(torch.zeros(2, 2)))


def move(module: nn.Module) -> None:
    with converting("swap"):
        module.to(torch.float32).to(torch.float64)


def load(module: nn.Module) -> None:
    with converting("swap"):
        module.load_state_dict({k: v.clone() * 0.5 for k, v in module.state_dict().items()})


# And the layer that the error names.
SWAPS: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "a layer": (lambda module: swap_all(module.layers["b"]), "b"),
    "each other": (swap_each_other, "[ab]"),
    "all": (swap_all, "."),
    "loaded": (load, "."),
    "a loaded layer": (lambda module: load(module.layers["b"]), "b"),
    "moved": (move, "."),
    "another shape": (swap_with_another_shape, "b"),
}


def batch(step: int) -> Tensor:
    return drawn(3, 4, step=step, dtype=torch.float64)


def wrapped(view: bool = False) -> tritonddp.DistributedDataParallel:
    """After a step."""
    ddp = wrap(Layers("abc").double(), view, bucket_cap_mb=1e-4)
    assert_right_step(ddp, batch(0))
    ddp.zero_grad()
    return ddp


@pytest.mark.parametrize("name", SWAPS)
@ranks(2, views=True)
def test_swapped_tensors_are_an_error_at_each_forward(name: str, view: bool) -> None:
    change, layer = SWAPS[name]
    ddp = wrapped(view)
    ddp.module(batch(1)).sum().backward()  # is noted, without a weak reference to parameters
    ddp.zero_grad()
    change(ddp.module)
    for context in (nullcontext(), ddp.no_sync()):
        with context, pytest.raises(RuntimeError, match=SWAPPED % (layer, r"\w+")):
            ddp(batch(1))
    if name == "another shape":
        return
    with torch.no_grad():
        ddp(batch(1))
    module = ddp.module
    del ddp  # it holds nodes of the graph that torch has invalidated
    ddp = wrap(module, view, bucket_cap_mb=1e-4)
    for step in range(2, 4):
        assert_right_step(ddp, batch(step))


@ranks(2)
def test_only_the_rank_that_swaps_raises_the_error(rank: int) -> None:
    ddp = wrapped()
    if rank == 1:
        swap_all(ddp.module.layers["b"])
        with pytest.raises(RuntimeError, match=SWAPPED % ("b", r"\w+")):
            ddp(batch(1))
    # The former wrapper still exists, and ignores the backwards of the new one.
    again = wrap(ddp.module, bucket_cap_mb=1e-4)
    for step in range(2, 4):
        assert_right_step(again, batch(step))


@ranks(2)
def test_tensors_outside_of_the_buckets_may_be_swapped() -> None:
    net = Layers("abc").double()
    frozen = net.layers["b"].requires_grad_(False)
    ddp = wrap(net, bucket_cap_mb=1e-4)
    assert_right_step(ddp, batch(0))
    move(nn.Linear(2, 2).double())  # another module
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
