"""Parameters that are converted go on; those that swap_tensors gives another tensor are refused."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from differential.actions.training import converting
from distributed import ranks
from modules import Layers
from oracle import one_per_rank
from torch import nn
from training import drawn, wrap

import tritonddp

SWAPPED = r"rank \d, step \d: .*swap_tensors.* of parameter 'layers\.%s\.%s'.*wrap the module again"


def swap(*names: str) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for name, param in module.named_parameters():
            if not names or name.split(".")[1] in names:
                param.grad = None
                torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone() * 0.5))

    return change


def move(by: str) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        with converting(by):
            module.to(torch.float32).to(torch.float64)

    return change


def load(module: nn.Module) -> None:
    with converting("swap"):
        module.load_state_dict({k: v.clone() * 0.5 for k, v in module.state_dict().items()})


def assign(module: nn.Module) -> None:
    state = {k: v.clone() * 0.5 for k, v in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def of_a_layer(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    return lambda module: change(module.layers["b"])


def swap_mutually(module: nn.Module) -> None:
    one, other = module.layers["a"].weight, module.layers["b"].weight
    one.grad = other.grad = None
    torch.utils.swap_tensors(one, other)


def swap_for_another_kind(module: nn.Module) -> None:
    torch.utils.swap_tensors(module.layers["b"].weight, nn.Parameter(torch.zeros(2, 2)))


CONVERSIONS = {
    "moved by data": move("data"),
    "moved by new ones": move("overwrite"),
    "a layer moved by data": of_a_layer(move("data")),
    "assigned": assign,
}
# And the layer that the error names.
SWAPS = {
    "one": (swap("b"), "b"),
    "mutually": (swap_mutually, "[ab]"),
    "all": (swap(), "."),
    "loaded": (load, "."),
    "a loaded layer": (of_a_layer(load), "b"),
    "moved by swaps": (move("swap"), "."),
    "another kind": (swap_for_another_kind, "b"),
}


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    return drawn(3, 4, step=step, rank=rank, dtype=torch.float64)


def check(ddp: nn.Module, *steps: int, tolerance: float = 1e-12) -> None:
    """Backwards, all but the last under ``no_sync``: their mean is added to ``.grad``."""
    before = [0 if p.grad is None else p.grad.clone() for p in ddp.parameters()]
    alone = one_per_rank(getattr(ddp, "module", ddp))
    for rank, each in enumerate(alone):
        for step in steps:
            each(batch(step, rank)).sum().backward()
    for step in steps:
        with nullcontext() if step == steps[-1] else ddp.no_sync():
            ddp(batch(step)).sum().backward()
    columns = zip(before, *map(nn.Module.parameters, alone), strict=True)
    for param, (former, *of_ranks) in zip(ddp.parameters(), columns, strict=True):
        if param.requires_grad:
            mean = former + sum(each.grad for each in of_ranks) / len(of_ranks)
            torch.testing.assert_close(param.grad, mean, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "kept"])
@ranks(2, views=True)
def test_the_step_after_a_conversion_is_right(keeps: bool, view: bool) -> None:
    for change in CONVERSIONS.values():
        ddp = wrap(Layers("abc").double(), view, bucket_cap_mb=1e-4)
        for step in range(6):
            if not keeps:
                ddp.zero_grad()
            check(ddp, step, tolerance=1e-6)
            if step % 2:
                change(ddp.module)


@ranks(2)
def test_views_of_buckets_whose_data_was_set_are_led_back() -> None:
    """Also where nobody tells: no parameter has moved."""
    ddp = wrap(Layers("abc").double(), view=True, bucket_cap_mb=1e-4)
    for step in range(6):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        check(ddp, step)
        for param in ddp.parameters():
            param.grad.data = param.grad.data * 2


@pytest.mark.parametrize("name", SWAPS)
@ranks(2, views=True)
def test_swapped_tensors_are_an_error_at_each_forward(name: str, view: bool) -> None:
    change, layer = SWAPS[name]
    ddp = wrap(Layers("abc").double(), view, bucket_cap_mb=1e-4)
    check(ddp, 0)
    ddp.module(batch(1)).sum().backward()  # is noted, without a weak reference to parameters
    ddp.zero_grad()
    change(ddp.module)
    for context in (nullcontext(), ddp.no_sync()):
        with context, pytest.raises(RuntimeError, match=SWAPPED % (layer, r"\w+")):
            ddp(batch(1))
    if name == "another kind":
        return
    module = ddp.module
    with torch.no_grad():
        ddp(batch(1))
    del ddp
    ddp = wrap(module, view, bucket_cap_mb=1e-4)
    for step in range(2, 4):
        ddp.zero_grad()
        check(ddp, step, tolerance=1e-6)


@ranks(2)
def test_one_rank_alone_names_what_it_has_swapped(rank: int) -> None:
    ddp = wrap(Layers("abc").double(), bucket_cap_mb=1e-4)
    check(ddp, 0)
    ddp.zero_grad()
    if rank == 1:
        swap("b")(ddp.module)
        with pytest.raises(RuntimeError, match=SWAPPED % ("b", r"\w+")):
            ddp(batch(1))
    # The former wrapper is still there, and leaves the backwards of the new one alone.
    again = wrap(ddp.module, bucket_cap_mb=1e-4)
    for step in range(2, 4):
        again.zero_grad()
        check(again, step)


@ranks(2)
def test_tensors_that_no_bucket_has_may_be_swapped() -> None:
    net = Layers("abc").double()
    net.layers["b"].requires_grad_(False)
    ddp = wrap(net, bucket_cap_mb=1e-4)
    check(ddp, 0)
    move("swap")(nn.Linear(2, 2).double())  # of another module
    for param in net.layers["b"].parameters():
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone(), requires_grad=False))
    check(ddp, 1)
    ddp.zero_grad()
    net.layers["b"].requires_grad_(True)
    check(ddp, 2)


@ranks(2)
def test_tensors_swapped_between_forward_and_backward_are_an_error_in_both() -> None:
    ddp = wrap(Layers("abc").double(), bucket_cap_mb=1e-4)
    check(ddp, 0)
    ddp.zero_grad()
    loss = ddp(batch(1)).sum()
    bias = ddp.module.layers["b"].bias  # (of a weight, which the graph has, it refuses that)
    torch.utils.swap_tensors(bias, nn.Parameter(bias.detach().clone()))
    for call in (loss.backward, partial(ddp, batch(2))):
        with pytest.raises(RuntimeError, match=SWAPPED % ("b", "bias")):
            call()


@ranks(2)
def test_a_backward_without_a_forward_names_swapped_tensors_too() -> None:
    net = tritonddp.replicate(Layers("abc").double())
    check(net, 0)
    swap()(net)
    with pytest.raises(RuntimeError, match=SWAPPED % (".", r"\w+")):
        net.layers["a"](batch(1)).sum().backward()
    ddp = wrap(Layers("abc").double())
    check(ddp, 0)
    ddp(batch(1))  # its reduction is that of the next backward
    swap()(ddp.module)
    with pytest.raises(RuntimeError, match=SWAPPED % (".", r"\w+")):
        ddp.module.layers["a"](batch(1)).sum().backward()
