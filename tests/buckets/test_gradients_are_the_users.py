"""After a backward ``.grad`` behaves as under stock DDP: for who holds, marks, copies or frees it.

Large gradients, into which the ranks of a host sum straight, and small ones, which are copied.
"""

import contextlib
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from modules import Withheld
from torch import Tensor, nn
from training import WAYS, beside_stock, drawn, gradients, raises_if, train_step

from tritonddp.buckets.grad_storage.grad_storage import GradStorage
from tritonddp.comm.all_reduce import Collective
from tritonddp.comm.host import memory_exchange
from tritonddp.comm.host.rank_buffers import RankBuffers

SIZE = 10_000  # elements of a gradient that is large
STRICT = {"find_unused_parameters": False}


class Branches(nn.Module):
    """Vectors; a call may leave some of them out."""

    def __init__(self, count: int = 4, size: int = SIZE) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(size) for _ in range(count))

    def forward(self, x: Tensor, without: tuple[int, ...] = ()) -> Tensor:
        used = [vector for i, vector in enumerate(self.vectors) if i not in without]
        return torch.stack([(vector * vector * x[: len(vector)]).sum() for vector in used]).sum()


def batch(step: int) -> Tensor:
    return drawn(SIZE, step=step)


def step(model: nn.Module, number: int, without: tuple[int, ...] = ()) -> None:
    inputs = [batch(number), without] if without else [batch(number)]
    train_step(model, *inputs, loss=torch.sum)


class Withholding(nn.Module):
    """A weight whose gradient is withheld at times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, gives: bool) -> Tensor:
        return Withheld.apply(self.first(x), self.weight, gives)


def same_steps(ours: nn.Module, stock: nn.Module, *numbers: int) -> None:
    """Steps of both, after each of which gradients have the same bits."""
    for number in numbers:
        step(ours, number)
        step(stock, number)
        assert_same_bits(gradients(ours), gradients(stock), f"gradients in step {number}")


@ranks(2)
def test_a_graph_of_gradients_keeps_them_as_they_are() -> None:
    ours, _ = beside_stock(Branches())
    for _ in range(3):
        ours.zero_grad()
        ours(batch(0)).backward(create_graph=True)
        assert all(param.grad.requires_grad for param in ours.parameters())


@ranks(2)
def test_hooks_on_the_nodes_that_accumulate_change_what_is_averaged() -> None:
    """Under stock they come behind the copy into the bucket, and what they write is overwritten."""
    ours, stock = beside_stock(Branches())
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
        halves = [grad / 2 for grad in gradients(stock)]
        assert_same_bits(gradients(ours), halves, f"gradients in step {number}")


@ranks(2)
def test_a_program_that_clears_the_hooks_of_its_parameters_gets_means_too() -> None:
    ours, stock = beside_stock(Branches())
    for param in ours.parameters():
        param._post_accumulate_grad_hooks.clear()
    same_steps(ours, stock, 0, 1)


@ranks(2)
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("options", [{}, STRICT, {"find_unused_parameters": True}], ids=str)
def test_of_a_gradient_that_is_withheld_what_lies_in_grad_counts(
    rank: int, view: bool, options: dict[str, Any]
) -> None:
    """Nothing counts as zero if no parameter may be unused; else the parameter is unused."""
    ours, stock = beside_stock(Withholding(), gradient_as_bucket_view=view, **options)
    for number in range(8):
        for net in (ours, stock):
            net.zero_grad(set_to_none=number != 7)
            if number in (2, 3):
                net.module.weight.grad = torch.full((4,), 1.0 + rank)
            gives = number in (3, 6) or (number == 4 and rank == 0)
            net(drawn(3, 4, step=number), gives).sum().backward()
        expected = gradients(stock)
        if not options and number in (0, 1, 5):  # nobody has one
            expected[0] = None
        assert_same_bits(gradients(ours), expected, f"gradients in step {number}")


@ranks(2)
def test_gradients_may_be_lazily_negated_also_by_a_communication_hook(rank: int) -> None:
    def negate(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch._neg_view(bucket.buffer()))
        return future

    ours, stock = beside_stock(nn.Linear(4, 3))
    for hook in (None, negate):
        for net in (ours, stock):
            if hook is not None:
                net.register_comm_hook(None, hook)
            for param in net.parameters():
                param.grad = torch._neg_view(torch.full(param.shape, 2.0 + rank))
            net(drawn(5, 4)).sum().backward()
        assert_same_bits(gradients(ours), gradients(stock), f"gradients with {hook}")


@ranks(2)
def test_gradients_that_are_bucket_views_are_tensors_in_their_own_right() -> None:
    """Those of stock are views in autograd's sense, which share one version and refuse this."""
    ours, _ = beside_stock(Branches(), gradient_as_bucket_view=True)
    for number in range(2):
        step(ours, number)
    first, second = ours.module.vectors[0].grad, ours.module.vectors[1].grad
    assert not first._is_view()
    first.detach_()
    version = second._version
    first.zero_()
    assert second._version == version


@ranks(2)
def test_a_hook_that_reads_the_bucket_view_of_another_parameter_sees_its_own_rank() -> None:
    """Under stock that is divided by the number of ranks already."""
    nets = beside_stock(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), **WAYS["views"])
    seen: list[Tensor] = []
    for net in nets:
        first, last = net.module[0].bias, net.module[1].weight
        first.register_hook(lambda _, last=last: seen.append(last.grad.clone()))
        net(drawn(4, 3)).sum().backward()
    ours, stock = seen
    assert_same_bits(ours, 2 * stock)


@ranks(2)
def test_a_slow_rank_still_reads_what_the_others_packed(rank: int) -> None:
    """They may pack again only when its last gradient is summed."""
    ours, stock = beside_stock(Branches())
    same_steps(ours, stock, 0, 1)
    expected = []
    for number in range(2, 6):
        step(stock, number)
        expected.append(gradients(stock))
    sum_into = RankBuffers.sum_into

    def late(*arguments: Any) -> None:
        time.sleep(0.1)
        sum_into(*arguments)

    slow = mock.patch.object(RankBuffers, "sum_into", late)
    with slow if rank else contextlib.nullcontext():
        for number, grads in enumerate(expected, start=2):
            step(ours, number)
            assert_same_bits(gradients(ours), grads, "gradient")


class WithRows(Branches):
    """Vectors, and rows whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 8, sparse=True)

    def forward(self, x: Tensor, without: tuple[int, ...] = ()) -> Tensor:
        return self.rows(torch.tensor([1, 3])).sum() + super().forward(x, without)


@pytest.mark.parametrize("fails_in", [0, 3])
@pytest.mark.parametrize("how", ["into .grad", "in shares", "copied", "rows"])
@ranks(2)
def test_after_a_mean_that_was_not_written_all_go_on(rank: int, how: str, fails_in: int) -> None:
    """Of the first bucket, or the last, on one rank: it takes part in what is on its way."""
    owner, name = (
        (GradStorage, "unpack") if how in ("copied", "rows") else (RankBuffers, "sum_into")
    )
    shares = {"_RANKS_OF_SHARES": 2, "_BYTES_OF_SHARES": 0} if how == "in shares" else {}
    with (
        mock.patch.dict(os.environ, {"TRITONDDP_PEER_MEMORY": "0"} if how == "copied" else {}),
        mock.patch.multiple(memory_exchange, **shares) if shares else contextlib.nullcontext(),
    ):
        net = WithRows() if how == "rows" else Branches()
        ours, stock = beside_stock(net, bucket_cap_mb=3e-2)
        same_steps(ours, stock, 0, 1)
    assert len(ours.reducer.buckets) == 4 + (how == "rows")
    writes, calls = getattr(owner, name), []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1 + fails_in:
            raise RuntimeError("amid a sum")
        writes(*arguments)

    fails_here = rank == 1
    pause = 0 if fails_here else 0.02  # the buckets of the other rank come while this one waits
    hooks = [each.register_hook(lambda _: time.sleep(pause)) for each in ours.parameters()]
    with (
        mock.patch.object(owner, name, fails if fails_here else writes),
        mock.patch.object(Collective, "wait", autospec=True, side_effect=Collective.wait) as waits,
        raises_if(fails_here, RuntimeError, match="amid a sum"),
    ):
        step(ours, 2)
    if how == "copied":
        assert waits.call_count == 4
    for hook in hooks:
        hook.remove()
    same_steps(ours, stock, 3, 4, 5)


@ranks(2)
def test_nothing_is_written_to_the_buffer_of_large_gradients() -> None:
    """So the system need not give it memory."""
    ours, stock = beside_stock(Branches())
    step(ours, 0)
    for bucket in ours.reducer.buckets:
        bucket.flat.payload.fill_(7)
    same_steps(ours, stock, 1, 2, 3)
    assert all((bucket.flat.payload == 7).all() for bucket in ours.reducer.buckets)
