"""After a backward ``.grad`` behaves as under stock DDP: for who holds, marks, copies or frees it.

Large gradients, into which the ranks of a host sum straight, and small ones, which are copied.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel
from tritonddp.buckets.rank_buffers import RankBuffers

SIZE = 10_000  # elements of a gradient that is large
SIZES = pytest.mark.parametrize("size", [SIZE, 100], ids=["large", "small"])
VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Branches(nn.Module):
    """Vectors; a call may leave some of them out."""

    def __init__(self, count: int = 4, size: int = SIZE) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(size) for _ in range(count))

    def forward(self, x: Tensor, without: tuple[int, ...] = ()) -> Tensor:
        used = [vector for i, vector in enumerate(self.vectors) if i not in without]
        return torch.stack([(vector * vector * x[: len(vector)]).sum() for vector in used]).sum()


class Matrices(nn.Module):
    """Weights and biases whose number of bytes is no multiple of 64."""

    def __init__(self, width: int = 129) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[: 4 * 129].view(4, 129)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def pair(model: nn.Module | None = None, **options: Any) -> tuple[DistributedDataParallel, Stock]:
    model = Branches() if model is None else model
    return DistributedDataParallel(copy.deepcopy(model), **options), Stock(model, **options)


def step(model: nn.Module, number: int, without: tuple[int, ...] = ()) -> None:
    model.zero_grad()
    model(batch(number), *([without] if without else [])).backward()


def assert_same(ours: nn.Module, stock: nn.Module) -> None:
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert_same_bits(a.grad, b.grad, "gradient")


def for_both(function: Callable[[nn.Module], Any], **options: Any) -> None:
    """``function`` returns the same for a model of ours and one of stock."""
    ours, stock = pair(**options)
    mine, theirs = function(ours), function(stock)
    assert mine == theirs


@SIZES
@ranks(2)
def test_a_gradient_is_the_tensor_that_autograd_made_with_its_marks(size: int) -> None:
    seen: dict[Tensor, Tensor] = {}

    def mark(param: Tensor) -> None:
        param.grad.rate = 0.1
        seen[param] = param.grad

    class Marked(Tensor):
        pass

    def replace(param: Tensor) -> None:
        param.grad = param.grad.as_subclass(Marked)

    def found(model: nn.Module) -> list[Any]:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(mark)
        model.module.vectors[1].register_post_accumulate_grad_hook(replace)
        rows = []
        for number in range(3):
            step(model, number)
            for param in model.parameters():
                grad = param.grad
                same = grad is seen[param]
                rows.append((same, grad.rate if same else type(grad).__name__, grad._is_view()))
                rows.append((grad._version, grad.sum().item()))
        return rows

    for_both(found, model=Branches(size=size))


@SIZES
@ranks(2)
def test_a_copy_and_a_pickle_of_a_gradient_hold_that_alone(size: int) -> None:
    def found(model: nn.Module) -> list[int]:
        for number in range(3):
            step(model, number)
        grad, saved = model.module.vectors[2].grad, io.BytesIO()
        torch.save(grad, saved)
        copied = copy.deepcopy(grad)
        return [
            grad.untyped_storage().nbytes(),
            copied.untyped_storage().nbytes(),
            len(pickle.dumps(grad)),
            len(saved.getvalue()),
        ]

    for_both(found, model=Branches(size=size))


@SIZES
@ranks(2)
def test_a_gradient_may_be_freed_or_shared_between_processes(size: int) -> None:
    ours, stock = pair(Branches(size=size))
    for number in range(5):
        for model in (ours, stock):
            step(model, number)
            model.module.vectors[0].grad.share_memory_()
            model(batch(number)).backward()  # adds to it
        assert_same(ours, stock)
        for model in (ours, stock):
            for param in model.parameters():
                param.grad.untyped_storage().resize_(0)
                param.grad = None


@pytest.mark.parametrize("width", [129, 33], ids=["large", "small"])
@ranks(2)
def test_gradients_are_aligned_as_those_of_stock(width: int) -> None:
    """So that products of matrices, as Shampoo and SOAP make them, have the same bits."""

    class Net(Matrices):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x[: 4 * width].view(4, width)).square().mean()

    ours, stock = pair(Net(width))
    for number in range(4):
        for model in (ours, stock):
            step(model, number)
            assert {param.grad.data_ptr() % 64 for param in model.parameters()} == {0}
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            if a.dim() == 2:
                assert_same_bits(a.grad @ a.grad.T, b.grad @ b.grad.T, "product")
                assert_same_bits(
                    a.grad[:, :2].clone().view(torch.int64).sum(),
                    b.grad[:, :2].clone().view(torch.int64).sum(),
                    "words",
                )


@pytest.mark.parametrize("how", ["itself", "detached", "a slice", "numpy"])
@SIZES
@ranks(2)
def test_who_holds_a_gradient_from_a_hook_on_sees_the_mean(size: int, how: str) -> None:
    ours, stock = pair(Branches(size=size))
    held: list[Any] = []
    look: dict[str, Callable[[Tensor], Any]] = {
        "itself": lambda grad: grad,
        "detached": lambda grad: grad.detach(),
        "a slice": lambda grad: grad[5:],
        "numpy": lambda grad: grad.numpy(),
    }
    for model in (ours, stock):
        param = model.module.vectors[1]
        param.register_post_accumulate_grad_hook(lambda param: held.append(look[how](param.grad)))
    for number in range(3):
        held.clear()
        for model in (ours, stock):
            step(model, number)
        mine, theirs = map(torch.as_tensor, held)
        assert_same_bits(mine, theirs, "held gradient")
        assert_same_bits(mine, ours.module.vectors[1].grad[-len(mine) :], "held gradient")


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


@VIEW
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


@VIEW
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


@pytest.mark.parametrize("find", [None, False, True])
@VIEW
@ranks(2)
def test_a_gradient_that_a_hook_drops_counts_as_under_stock(view: bool, find: bool | None) -> None:
    """As zeros; with ``find_unused_parameters=True`` as that of an unused parameter."""
    model = Branches()
    options = {} if find is None else {"find_unused_parameters": find}
    ours, stock = pair(model, gradient_as_bucket_view=view, **options)

    def drop(param: Tensor) -> None:
        param.grad = None

    for each in (ours, stock):
        each.module.vectors[0].register_post_accumulate_grad_hook(drop)  # on all ranks
        if dist.get_rank() == 0:
            each.module.vectors[1].register_post_accumulate_grad_hook(drop)
    for number in range(4):
        for each in (ours, stock):
            step(each, number)
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                assert_same_bits(a.grad, b.grad, "gradient")


@ranks(2)
def test_hooks_on_the_nodes_that_accumulate_change_what_is_averaged() -> None:
    """Under stock they come behind the copy into the bucket, and what they write is overwritten."""
    ours, stock = pair()
    nodes = []
    for model in (ours, stock):
        for param in model.parameters():
            node = param.expand_as(param).grad_fn.next_functions[0][0]

            def halve(*_: Any, param: Tensor = param) -> None:
                param.grad.mul_(0.5)

            node.register_hook(halve)
            nodes.append(node)
    for number in range(4):
        step(ours, number)
        step(stock, number)
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            assert_same_bits(2 * a.grad, b.grad, "gradient")


@ranks(2)
def test_gradients_that_are_bucket_views_are_tensors_in_their_own_right() -> None:
    """Those of stock are views in autograd's sense, which share one version and refuse this."""
    ours, _ = pair(gradient_as_bucket_view=True)
    for number in range(2):
        step(ours, number)
    first, second = ours.module.vectors[0].grad, ours.module.vectors[1].grad
    assert not first._is_view()
    first.detach_()
    version = second._version
    first.zero_()
    assert second._version == version


@ranks(2)
def test_a_slow_rank_still_reads_what_the_others_packed() -> None:
    """They may pack again only when its last gradient is summed."""
    ours, stock = pair()
    expected = []
    for number in range(6):
        step(stock, number)
        expected.append([param.grad for param in stock.parameters()])
    for number in range(2):
        step(ours, number)
    sum_into = RankBuffers.sum_into

    def late(*arguments: Any) -> None:
        time.sleep(0.1)
        sum_into(*arguments)

    slow = mock.patch.object(RankBuffers, "sum_into", late)
    with slow if dist.get_rank() else contextlib.nullcontext():
        for number in range(2, 6):
            step(ours, number)
            for param, grad in zip(ours.parameters(), expected[number], strict=True):
                assert_same_bits(param.grad, grad, "gradient")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("fails_in", [0, 3])
@ranks(2)
def test_after_a_sum_that_broke_off_all_go_on(fails_in: int, error: type[BaseException]) -> None:
    """In the first bucket, or when the last is summed, on one rank; the others do not wait."""
    ours, stock = pair(bucket_cap_mb=3e-2)
    for number in range(2):
        step(ours, number)
        step(stock, number)
    assert len(ours.reducer.buckets) == 4
    sum_into, calls = RankBuffers.sum_into, []

    def fails(self: RankBuffers, grads: Any, factor: Any = None) -> None:
        calls.append(self)
        if len(calls) == 1 + fails_in:
            raise error("amid a sum")
        sum_into(self, grads, factor)

    if dist.get_rank() == 1:
        with mock.patch.object(RankBuffers, "sum_into", fails), pytest.raises(error):
            step(ours, 2)
    else:
        step(ours, 2)
    for number in range(3, 6):
        step(ours, number)
        step(stock, number)
        assert_same(ours, stock)


@ranks(2)
def test_nothing_is_written_to_the_buffer_of_large_gradients() -> None:
    """So the system need not give it memory."""
    ours, stock = pair()
    step(ours, 0)
    for bucket in ours.reducer.buckets:
        bucket.flat.payload.fill_(7)
    for number in range(1, 4):
        step(ours, number)
        step(stock, number)
        assert_same(ours, stock)
    assert all((bucket.flat.payload == 7).all() for bucket in ours.reducer.buckets)
