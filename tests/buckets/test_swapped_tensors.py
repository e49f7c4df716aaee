"""Another tensor behind a parameter: the object stays, its autograd node and our hooks do not."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from differential.actions.training import converting
from distributed import assert_same_on_all_ranks, ranks
from modules import Layers
from oracle import one_per_rank
from torch import nn
from training import drawn, wrap

import tritonddp


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
    with converting("load_state_dict"):
        module.load_state_dict({k: v.clone() * 0.5 for k, v in module.state_dict().items()})


def of_a_layer(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    return lambda module: change(module.layers["b"])


def swap_mutually(module: nn.Module) -> None:
    one, other = module.layers["a"].weight, module.layers["b"].weight
    one.grad = other.grad = None
    torch.utils.swap_tensors(one, other)


CHANGES = {
    "one": swap("b"),
    "mutually": swap_mutually,
    "last": swap("a"),
    "all": swap(),
    "loaded": load,
    "a loaded layer": of_a_layer(load),
    "moved by swaps": move("swap"),
    "moved by data": move("data"),
    "moved by new ones": move("overwrite"),
    "a layer moved by swaps": of_a_layer(move("swap")),
    "a layer moved by data": of_a_layer(move("data")),
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
def test_the_next_step_is_right(keeps: bool, view: bool) -> None:
    for change in CHANGES.values():
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


@pytest.mark.parametrize("change", ["one", "all"])
@ranks(2, 3, views=True)
def test_one_rank_alone_may_do_it(rank: int, change: str, view: bool) -> None:
    ddp = wrap(Layers("abc").double(), view, bucket_cap_mb=1e-4)
    for step in range(5):
        ddp.zero_grad()
        check(ddp, step)
        if rank == 1 and step % 2:
            for name, param in ddp.module.named_parameters():
                if change == "all" or ".b." in name:
                    param.grad = None
                    torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))


@ranks(2)
def test_it_may_follow_a_backward_around_the_wrapper() -> None:
    """Which is noted, for a warning, without a weak reference to parameters or gradients."""
    ddp = wrap(Layers("abc").double())
    check(ddp, 0)
    ddp.module(batch(1)).sum().backward()
    move("swap")(ddp.module)
    ddp.zero_grad()
    swap("b")(ddp.module)
    check(ddp, 1)


@ranks(2)
def test_another_kind_is_named_at_the_forward(rank: int) -> None:
    ddp = wrap(Layers("abc").double())
    check(ddp, 0)
    ddp.zero_grad()
    for other in (torch.zeros(4, 4), torch.zeros(2, 2, dtype=torch.float64)):
        torch.utils.swap_tensors(ddp.module.layers["b"].weight, nn.Parameter(other))
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"'layers\.b\.weight' was torch\.float64 on cpu.*wrap"
            ):
                ddp(batch(1))
    right = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    torch.utils.swap_tensors(ddp.module.layers["b"].weight, right)
    check(ddp, 2)


@ranks(2)
def test_what_torch_refuses_between_forward_and_backward_comes_through(rank: int) -> None:
    ddp = wrap(Layers("abc").double(), bucket_cap_mb=1e-4)
    check(ddp, 0)
    for who in (0, 1):
        ddp.zero_grad()
        loss = ddp(batch(1)).sum()
        if who in (1, 1 + rank):
            bias = ddp.module.layers[
                "b"
            ].bias  # (of a weight, which the graph has, it refuses that)
            torch.utils.swap_tensors(bias, nn.Parameter(bias.detach().clone()))
            with pytest.raises(RuntimeError, match="poisoned by swap_tensors"):
                loss.backward()
        else:
            loss.backward()
        ddp.zero_grad()
        check(ddp, 2)


@ranks(2)
def test_in_place_an_optimizer_refuses_gradients_of_which_nothing_told() -> None:
    net = tritonddp.replicate(Layers("abc").double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    check(net, 0)
    swap()(net)
    net.layers["a"](batch(1)).sum().backward()  # no hook is left on these
    with pytest.raises(RuntimeError, match=r"'layers\.a\.weight'.*call the module itself once"):
        optimizer.step()
    net.zero_grad()
    check(net, 2)
    net.zero_grad()
    net.layers["a"](batch(1)).sum().backward()
    assert_same_on_all_ranks([net.layers["a"].weight.grad])
    optimizer.step()
