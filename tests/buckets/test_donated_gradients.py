"""On the CPU a large gradient stays in its bucket's buffer: nobody else may notice."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel

SIZE = 10_000  # elements, enough to be donated


class Branches(nn.Module):
    """Large vectors; a call may leave some of them out."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(SIZE) for _ in range(count))

    def forward(self, x: Tensor, without: tuple[int, ...] = ()) -> Tensor:
        used = [vector for i, vector in enumerate(self.vectors) if i not in without]
        return torch.stack([(vector * vector * x).sum() for vector in used]).sum()


def batch(step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def pair(**options: bool) -> tuple[DistributedDataParallel, Stock]:
    model = Branches()
    return DistributedDataParallel(copy.deepcopy(model), **options), Stock(model, **options)


def step(model: nn.Module, number: int, without: tuple[int, ...] = ()) -> None:
    model.zero_grad()
    model(batch(number), without).backward()


def storages(model: nn.Module) -> set[int]:
    return {param.grad.untyped_storage().data_ptr() for param in model.parameters()}


def assert_same(ours: nn.Module, stock: nn.Module) -> None:
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert_same_bits(a.grad, b.grad, "gradient")


@ranks(2)
def test_a_buffer_is_used_again_once_its_gradients_are_gone() -> None:
    ours, stock = pair()
    before, seen = ours.reducer.counters.unflattens, set()
    for number in range(5):
        step(ours, number)
        step(stock, number)
        assert_same(ours, stock)
        if number > 0:  # behind the rebuild
            seen |= storages(ours)
    assert len(seen) == len(ours.reducer.buckets)
    assert seen == {bucket.flat.data.data_ptr() for bucket in ours.reducer.buckets}
    assert ours.reducer.counters.unflattens == before


@pytest.mark.parametrize("how", ["itself", "detached", "a slice", "numpy", "in a graph"])
@ranks(2)
def test_a_gradient_that_is_held_stays_what_it_is(how: str) -> None:
    ours, stock = pair()
    for number in range(2):
        step(ours, number)
    param = ours.module.vectors[1]
    held = {
        "itself": lambda: param.grad,
        "detached": lambda: param.grad.detach(),
        "a slice": lambda: param.grad[5:],
        "numpy": lambda: param.grad.numpy(),
        "in a graph": lambda: (param.grad * torch.ones(SIZE, requires_grad=True)).sum(),
    }[how]()
    expected = param.grad.clone()
    for number in range(2, 5):
        step(ours, number)
        step(stock, number)
        assert_same(ours, stock)
        if how == "in a graph":
            leaf = held.grad_fn.next_functions[0][0].next_functions[1][0].variable
            (found,) = torch.autograd.grad(held, leaf, retain_graph=True)
        else:
            found = torch.as_tensor(held)
        assert_same_bits(found, expected[-len(found) :], "held gradient")


@ranks(2)
def test_whoever_holds_gradients_keeps_no_more_than_one_buffer_alive() -> None:
    ours, _ = pair(gradient_as_bucket_view=False)
    step(ours, 0)
    held, sizes = [], []
    for number in range(1, 6):
        step(ours, number)
        held.append(ours.module.vectors[0].grad)
        sizes.append(held[-1].untyped_storage().nbytes())
    buffer, alone = sum(bucket.nbytes for bucket in ours.reducer.buckets), 4 * SIZE
    assert sizes == [buffer] + [alone] * 4


@ranks(2)
def test_a_gradient_that_was_there_before_is_written_to_in_place() -> None:
    ours, stock = pair()
    for number in range(3):
        step(ours, number)
        step(stock, number)
    for param, other in zip(ours.parameters(), stock.parameters(), strict=True):
        param.grad = torch.full((SIZE,), 2.0)
        other.grad = torch.full((SIZE,), 2.0)
    mine = [param.grad for param in ours.parameters()]
    for number in range(3, 6):
        ours(batch(number)).backward()
        stock(batch(number)).backward()
        assert_same(ours, stock)
    assert all(a is b.grad for a, b in zip(mine, ours.parameters(), strict=True))


@ranks(2)
def test_zeroing_in_place_accumulating_and_setting_to_none_may_take_turns() -> None:
    ours, stock = pair()
    for number in range(12):
        for model in (ours, stock):
            if number % 3 == 0:
                model.zero_grad(set_to_none=False)
            elif number % 3 == 1:
                model.zero_grad()
            if number % 4 == 2:
                with model.no_sync():
                    model(batch(100 + number)).backward()
            model(batch(number)).backward()
        assert_same(ours, stock)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@ranks(2)
def test_a_gradient_of_another_rank_comes_into_being(view: bool) -> None:
    ours = DistributedDataParallel(Branches(), gradient_as_bucket_view=view)
    stock = Stock(
        copy.deepcopy(ours.module), gradient_as_bucket_view=view, find_unused_parameters=True
    )
    for number in range(5):
        without = (2, (dist.get_rank() + number) % 2)  # 2 nowhere, 0 and 1 on one rank each
        step(ours, number, without)
        step(stock, number, without)
        assert ours.module.vectors[2].grad is None
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            if b.grad is not None:
                assert_same_bits(a.grad, b.grad, "gradient")


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@ranks(2)
def test_hooks_that_change_a_gradient_come_before_it_is_sent(view: bool) -> None:
    ours, stock = pair(gradient_as_bucket_view=view)
    for model in (ours, stock):
        for scale, param in enumerate(model.parameters(), start=2):

            def change(param: Tensor, factor: int = scale * (1 + dist.get_rank())) -> None:
                param.grad.mul_(factor)

            param.register_post_accumulate_grad_hook(change)
    for number in range(4):
        step(ours, number)
        step(stock, number)
        assert_same(ours, stock)


@ranks(2)
def test_donated_gradients_are_tensors_in_their_own_right() -> None:
    ours, _ = pair()
    for number in range(2):
        step(ours, number)
    first, second = ours.module.vectors[0].grad, ours.module.vectors[1].grad
    assert not first._is_view()
    first.detach_()  # refused for views
    version = second._version
    first.zero_()
    assert second._version == version


@ranks(2)
def test_a_dropped_wrapper_leaves_the_gradients_to_the_parameters() -> None:
    model = Branches()
    ours = DistributedDataParallel(model)
    for number in range(2):
        step(ours, number)
    expected = [param.grad.clone() for param in model.parameters()]
    bucket = weakref.ref(ours.reducer.buckets[0])
    del ours
    assert bucket() is None
    for param, gradient in zip(model.parameters(), expected, strict=True):
        assert_same_bits(param.grad, gradient, "gradient")


@ranks(2)
def test_after_a_backward_that_broke_off_the_next_steps_are_right() -> None:
    ours, stock = pair()
    for number in range(2):
        step(ours, number)
        step(stock, number)
    ours.zero_grad()
    loss = ours(batch(2))
    if dist.get_rank() == 1:  # vector 3 comes first
        handle = ours.module.vectors[1].register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    else:
        loss.backward()
    for number in range(3, 6):
        step(ours, number)
        step(stock, number)
        assert_same(ours, stock)


@ranks(2)
def test_two_wrappers_around_the_same_parameters_both_reduce() -> None:
    model = Branches()
    first, second = DistributedDataParallel(model), DistributedDataParallel(model)
    stock = Stock(copy.deepcopy(model))
    for number in range(4):
        for ours in (first, second):
            step(ours, number)
            step(stock, number)
            for a, b in zip(model.parameters(), stock.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)


@ranks(2)
def test_a_gradient_that_a_hook_keeps_or_replaces_is_reduced_in_place() -> None:
    ours, stock = pair()
    kept: list[Tensor] = []
    mine = torch.empty(SIZE)

    def replace(param: Tensor) -> None:
        mine.copy_(param.grad)
        param.grad = mine

    ours.module.vectors[0].register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
    ours.module.vectors[1].register_post_accumulate_grad_hook(replace)
    for number in range(4):
        kept.clear()
        step(ours, number)
        step(stock, number)
        assert_same(ours, stock)
        assert kept[0] is ours.module.vectors[0].grad
        assert mine is ours.module.vectors[1].grad


@ranks(2)
def test_a_graph_of_gradients_keeps_them_as_they_are() -> None:
    ours, _ = pair()
    for _ in range(3):
        ours.zero_grad()
        ours(batch(0)).backward(create_graph=True)
        assert all(param.grad.requires_grad for param in ours.parameters())
