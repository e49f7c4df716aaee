"""What a table of cases cannot hold: errors, stale gradients, random windows, odd parameters.

The cases themselves are in ``cases``, run by ``test_nothing_to_know.py``.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from cases.models import Branches, batch, branch
from distributed import (
    assert_same_bits,
    assert_same_on_all_ranks,
    in_rings,
    ranks,
    recorded_collectives,
)
from oracle import Alone, Net, assert_mean, one_per_rank, seed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tritonddp import DistributedDataParallel

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def branches() -> Branches:
    return Branches().double()


def in_step(
    step: Callable[[Net, int], None], ddp: DistributedDataParallel, alone: list[Alone], number: int
) -> None:
    """Step ``number``, alone in the role of each rank, then wrapped; gradients must agree."""
    for rank, net in enumerate(alone):
        seed(rank, number)
        step(net, rank)
    seed(dist.get_rank(), number)
    step(ddp, dist.get_rank())
    assert_mean(ddp, alone, f"step {number}")


def checkpoint_behind(net: Net, rank: int) -> None:
    output = net(batch(), "ab")
    (output + checkpoint(branch(net, "c"), output, use_reentrant=True)).sum().backward()


def checkpoint_in_front(net: Net, rank: int) -> None:
    net(checkpoint(branch(net, "c"), batch(), use_reentrant=True), "ab").sum().backward()


def train_from_the_second_step_on(
    ddp: DistributedDataParallel, step: Callable[[Net, int], None], error: str | None
) -> None:
    alone = one_per_rank(ddp.module)
    ddp(batch(), "ab").sum().backward()
    if error is not None:
        with pytest.raises(RuntimeError, match=error):
            step(ddp, dist.get_rank())
    for number in range(3):
        for net in (ddp, *alone):
            net.zero_grad()
        in_step(step, ddp, alone, number)


@VIEW
@ranks(2)
def test_reentrant_checkpoint_that_is_new_but_in_time_is_reduced(view: bool) -> None:
    ddp = DistributedDataParallel(branches(), bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    train_from_the_second_step_on(ddp, checkpoint_behind, None)


@VIEW
@ranks(2)
def test_reentrant_checkpoint_that_is_new_and_late_is_named_and_then_waited_for(
    view: bool,
) -> None:
    ddp = DistributedDataParallel(branches(), bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    error = r"rank \d.*'branches.c.*use_reentrant=False"
    train_from_the_second_step_on(ddp, checkpoint_in_front, error)


class Inner(nn.Module):
    """Two vectors; the second one on demand, in a reentrant checkpoint behind the first, or before.

    Args:
        size: of each.
        is_before: where.
    """

    def __init__(self, size: int, is_before: bool = False) -> None:
        super().__init__()
        self.is_before = is_before
        self.first = nn.Parameter(torch.ones(size))
        self.second = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        if both and self.is_before:
            x = checkpoint(self._inner, x, use_reentrant=True)
        x = (self.first * x).mean()
        if both and not self.is_before:
            x = checkpoint(self._inner, x, use_reentrant=True)
        return x

    def _inner(self, x: Tensor) -> Tensor:
        return (self.second * x).mean()


def use_the_second_again(ddp: DistributedDataParallel, factor: Tensor) -> None:
    """After steps enough without it that nobody waits for its gradient."""
    alone = one_per_rank(ddp.module)
    for number, both in enumerate([False] * 3 + [True] * 2 + [False, True]):
        for net in (ddp, *alone):
            net.zero_grad()
        for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
            net(factor * (1.0 + rank), both).backward()
        assert_mean(ddp, alone, f"step {number}")


@VIEW
@pytest.mark.parametrize("size", [100, 1_100_000], ids=["one segment", "two segments"])
@ranks(2)
def test_a_gradient_of_an_inner_backward_counts_in_the_first_step_that_has_it(
    size: int, view: bool
) -> None:
    """Also where nothing of its segment was announced: that is packed behind it all the same."""
    ddp = DistributedDataParallel(Inner(size), bucket_cap_mb=100, gradient_as_bucket_view=view)
    use_the_second_again(ddp, torch.ones((), requires_grad=True))
    assert [len(bucket.segments) for bucket in ddp.reducer.buckets] == [1 if size == 100 else 2]


@VIEW
@ranks(2)
def test_a_gradient_of_an_inner_backward_counts_in_a_bucket_that_is_sent_later(view: bool) -> None:
    """No gradient comes behind it but the one that its bucket waits for."""
    module, outside = Inner(100, is_before=True), nn.Parameter(torch.ones(()))
    ddp = DistributedDataParallel(
        module,
        gradient_as_bucket_view=view,
        delay_all_reduce_named_params=[("second", module.second)],
        param_to_hook_all_reduce=outside,
    )
    use_the_second_again(ddp, outside)
    assert [bucket.names for bucket in ddp.reducer.buckets] == [["first"], ["second"]]


@VIEW
@ranks(2)
def test_a_layer_that_is_back_has_the_mean_in_that_very_step(view: bool) -> None:
    """Nobody uses it for some steps, then both ranks, or one of them, in a bucket of its own."""
    ddp = DistributedDataParallel(branches(), bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    alone = one_per_rank(ddp.module)
    used = [*2 * ["ab ab"], *3 * ["a a"], *2 * ["ab ab"], *2 * ["a a"], "a ab", "ab ab"]
    for number, names in enumerate(map(str.split, used)):
        for net in (ddp, *alone):
            net.zero_grad()

        def step(net: Net, rank: int, names: list[str] = names) -> None:
            net(batch(), names[rank]).sum().backward()

        in_step(step, ddp, alone, number)


@VIEW
@ranks(3)
def test_gradients_nobody_used_stay_bit_for_bit(view: bool) -> None:
    """None stays None; another one keeps its bits, and in copy mode stays the same tensor."""
    ddp = DistributedDataParallel(branches(), gradient_as_bucket_view=view)
    for _ in range(2):
        ddp(batch(), "abc").sum().backward()
    unused = [p for name in "bc" for p in ddp.module.branches[name].parameters()]
    never = [p for name in "def" for p in ddp.module.branches[name].parameters()]
    for param in unused:  # in place: a view stays one
        param.grad.mul_(1.1 + dist.get_rank())
    before = [(param.grad, param.grad.clone()) for param in unused]
    for _ in range(3):
        ddp(batch(), "a").sum().backward()
        for param, (grad, bits) in zip(unused, before, strict=True):
            assert_same_bits(param.grad, bits, "stale gradient")
            assert view or param.grad is grad
        assert all(param.grad is None for param in never)
    assert_same_on_all_ranks([param.grad for param in ddp.module.branches["a"].parameters()])


@VIEW
@ranks(2)
def test_gradients_that_differ_between_ranks_stay_so_while_nobody_uses_them(view: bool) -> None:
    """They were put there by the user; nothing says that they are to be reduced."""
    ddp = DistributedDataParallel(branches(), gradient_as_bucket_view=view)
    params = list(ddp.module.branches["c"].parameters())
    for param in params:
        param.grad = torch.full_like(param, 1.1 + dist.get_rank())
    for step in range(3):
        ddp(batch(), "ab").sum().backward()
        for param in params:
            expected = torch.full_like(param, 1.1 + dist.get_rank())
            assert_same_bits(param.grad, expected, f"step {step}")


@VIEW
@ranks(2)
def test_stale_gradient_of_odd_strides_contributes(view: bool) -> None:
    """A rank that does not use a parameter contributes what lies in .grad, however it lies."""
    numbers = torch.arange(32.0, dtype=torch.float64)
    for odd in (
        lambda: numbers[:16].clone().view(4, 4).t(),
        lambda: numbers[3].clone().expand(4, 4),
        lambda: numbers.clone().view(4, 8)[:, ::2],
    ):
        ddp = DistributedDataParallel(branches(), gradient_as_bucket_view=view)
        alone = one_per_rank(ddp.module)

        def step(net: Net, rank: int, odd: Callable[[], Tensor] = odd) -> None:
            net.zero_grad()
            if rank == 0:
                branch(net, "c")[0].weight.grad = odd()
            net(batch(), "abc" if rank else "ab").sum().backward()

        for number in range(3):
            in_step(step, ddp, alone, number)


def all_branches(net: Net, rank: int) -> None:
    net.zero_grad()
    net(batch(), "abcdef").sum().backward()


@VIEW
@pytest.mark.parametrize("offenders", [[0, 1], [1]], ids=["all ranks", "one rank"])
@ranks(2)
def test_strict_mode_raises_at_the_next_forward_and_then_goes_on(
    offenders: list[int], view: bool
) -> None:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(
        branches(), find_unused_parameters=False, gradient_as_bucket_view=view
    )
    alone = one_per_rank(ddp.module)
    for step in range(3):
        ddp(batch(), "abcde" if rank in offenders else "abcdef").sum().backward()
        if rank in offenders:
            with pytest.raises(RuntimeError, match="Expected to have finished") as caught:
                ddp(batch(), "abcdef")
            message = str(caught.value)
            unused = [name for name, _ in ddp.module.named_parameters() if ".f." in name]
            for part in [f"rank {rank}", "4 parameters", *unused, "find_unused_parameters=False"]:
                assert part in message, message
            assert "branches.e" not in message
        ddp.zero_grad()
        in_step(all_branches, ddp, alone, step)


@ranks(2)
def test_automatic_mode_is_the_default_and_what_true_means() -> None:
    for option in (
        {},
        {"find_unused_parameters": None},
        {"find_unused_parameters": True},
        {"find_unused_parameters": False, "static_graph": True},  # as in stock
    ):
        ddp = in_rings(branches(), **option)
        for _ in range(3):
            with recorded_collectives() as calls:
                ddp(batch(), "a").sum().backward()
        assert calls.names == ["all_reduce"] * len(ddp.reducer.buckets)


Microbatch = tuple[str, bool, bool]  # branches, forward inside no_sync, two backwards


def run_window(net: Net, microbatches: Sequence[Microbatch]) -> None:
    for number, (names, forward_inside, twice) in enumerate(microbatches):
        last = number == len(microbatches) - 1
        with net.no_sync() if forward_inside and not last else contextlib.nullcontext():
            loss = net(batch(), names).sum()
        with contextlib.nullcontext() if last else net.no_sync():
            if twice:
                loss.backward(retain_graph=True)
            loss.backward()


@VIEW
@pytest.mark.parametrize("number", [1, 2, 3])
@ranks(3)
def test_random_windows_of_random_branches(number: int, view: bool) -> None:
    """Windows whose shape all ranks share, and whose branches each rank chooses alone."""
    shared = random.Random(number)
    own = [random.Random(1000 * number + rank) for rank in range(3)]
    ddp = DistributedDataParallel(
        branches(), gradient_as_bucket_view=view, bucket_cap_mb=shared.choice([1e-6, 3e-4, None])
    )
    alone = one_per_rank(ddp.module)
    history = []
    for window in range(25):
        shapes = [
            (shared.random() < 0.5, shared.random() < 0.2)
            for _ in range(shared.choice([1, 1, 2, 3]))
        ]
        windows = [
            [("".join(rng.sample("abcdef", rng.choice([0, 1, 2, 5]))), *shape) for shape in shapes]
            for rng in own
        ]
        history.append(windows)
        in_step(lambda net, rank: run_window(net, history[-1][rank]), ddp, alone, window)
        forget = shared.choice(["drop", "zero", "keep"])
        if forget != "keep" or window % 5 == 4:
            for net in (ddp, *alone):
                net.zero_grad(set_to_none=forget != "zero")


def dropped_and_used_again(net: Net, rank: int) -> None:
    net.zero_grad()
    with net.no_sync():
        net(batch(), "abcdef").sum().backward()
    net.zero_grad()
    net(batch(), "abcd" if rank else "abc").sum().backward()


@VIEW
@ranks(2)
def test_used_under_no_sync_then_dropped_by_zero_grad_and_unused_here(view: bool) -> None:
    """A parameter may count as used on this rank and have no gradient all the same."""
    ddp = DistributedDataParallel(branches(), gradient_as_bucket_view=view)
    alone = one_per_rank(ddp.module)
    for number in range(3):
        in_step(dropped_and_used_again, ddp, alone, number)


class Tagged(torch.Tensor):
    """A subclass with the default ``__torch_function__``."""


@VIEW
@ranks(2)
def test_parameters_of_a_tensor_subclass_are_synchronised(view: bool) -> None:
    plain = nn.Linear(4, 4).double()
    model = copy.deepcopy(plain)
    model.weight = nn.Parameter(plain.weight.detach().clone().as_subclass(Tagged))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    alone = one_per_rank(plain)

    def step(net: Net, rank: int) -> None:
        net.zero_grad()
        net(batch()).pow(2).sum().backward()

    for number in range(3):
        in_step(step, ddp, alone, number)


@VIEW
@ranks(2)
def test_a_parameter_that_changes_its_dtype_is_an_error_that_names_it(view: bool) -> None:
    ddp = DistributedDataParallel(branches(), gradient_as_bucket_view=view)
    ddp(batch(), "abcdef").sum().backward()
    ddp.zero_grad()
    ddp.float()
    loss = ddp(batch().float(), "abcdef").sum()
    with pytest.raises(RuntimeError, match=r"'branches\..*float64.*is now torch.float32.*wrap"):
        loss.backward()
