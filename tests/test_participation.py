"""Any loss, any number of backwards, any use of `no_sync`: each gives the right gradients.

One oracle for all: the mean over ranks of what each rank's own, unwrapped model computes.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import (
    assert_same_bits,
    assert_same_on_all_ranks,
    ranks,
    recorded_collectives,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tritonddp import DistributedDataParallel

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Branches(nn.Module):
    """Runs the branches it is told to, each a small network, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for name in "abcdef"}
        )

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = x + self.branches[name](x)
        return x * 2


class Heads(Branches):
    """Returns the branches' outputs side by side instead."""

    def forward(self, x: Tensor, names: str) -> Any:
        return {name: [self.branches[name](x)] for name in names}


@dataclass
class Outputs:
    first: Tensor
    second: tuple[Tensor, ...]


class DataclassOutput(Branches):
    def forward(self, x: Tensor, names: str) -> Any:
        return Outputs(x.cos(), tuple(self.branches[name](x) for name in names))


class Checkpointed(Branches):
    """Checkpoints each branch."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = x + checkpoint(self.branches[name], x, use_reentrant=self.reentrant)
        return x * 2


class Alone(nn.Module):
    """The unwrapped model, with the methods of a wrapped one."""

    require_backward_grad_sync = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


Net = Alone | DistributedDataParallel
Scenario = Callable[[Net, int], None]


def batch(requires_grad: bool = True) -> Tensor:
    return torch.randn(3, 4, requires_grad=requires_grad)


def branch(net: Net, name: str) -> nn.Module:
    return net.module.branches[name]


def mean_over_ranks(params: list[nn.Parameter]) -> list[Tensor | None]:
    """The oracle. None where no rank has a gradient."""
    there = [param.grad is not None for param in params]
    local = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    grads = torch.cat([grad.detach().reshape(-1).double() for grad in local])
    everyone = [torch.empty_like(grads) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, grads)
    count = torch.tensor(there, dtype=torch.int)
    dist.all_reduce(count)
    means = (sum(everyone) / len(everyone)).split([param.numel() for param in params])
    return [
        mean.view(param.shape).to(param.dtype) if number else None
        for param, mean, number in zip(params, means, count.tolist(), strict=True)
    ]


def assert_mean(ddp: nn.Module, alone: nn.Module, what: str) -> None:
    params = list(ddp.parameters())
    expected = mean_over_ranks(list(alone.parameters()))
    for (name, _), param, mean in zip(alone.named_parameters(), params, expected, strict=True):
        where = f"{what}: gradient of {name} on rank {dist.get_rank()}"
        if mean is None:
            assert param.grad is None, f"{where} was made, but no rank used the parameter"
            continue
        assert param.grad is not None, f"{where} is missing"
        torch.testing.assert_close(param.grad, mean, msg=lambda text, w=where: f"{w}: {text}")
    assert_same_on_all_ranks([param.grad for param in params], what)


def check(
    scenario: Scenario,
    view: bool,
    model: nn.Module | None = None,
    reductions: int | None = 1,
    steps: int = 4,
    **options: Any,
) -> None:
    """Run the scenario wrapped and alone, without and with small buckets, and compare.

    In the first run gradients are dropped between steps, in the second one kept or zeroed in
    place. ``reductions`` is how often the scenario is to be reduced.
    """
    model = model or Branches()
    for habits in (["drop"], ["keep", "zero", "keep"]):
        caps: dict[str, Any] = {} if habits == ["drop"] else {"bucket_cap_mb": 1e-4}
        alone = Alone(copy.deepcopy(model))
        ddp = DistributedDataParallel(
            copy.deepcopy(model), gradient_as_bucket_view=view, **caps, **options
        )
        for step in range(steps):
            forget = habits[step % len(habits)]
            what = f"step {step}, gradients: {habits}"
            seed = 100 * step + dist.get_rank()
            torch.manual_seed(seed)
            scenario(alone, step)
            torch.manual_seed(seed)
            buckets = len(ddp.reducer.buckets)
            with recorded_collectives() as calls:
                scenario(ddp, step)
            if reductions is not None:
                agreement = ["broadcast"] if step == 0 else []
                names = ["all_reduce"] * buckets + agreement
                if step == 0 and reductions > 1:
                    names += ["all_reduce"] * len(ddp.reducer.buckets) * (reductions - 1)
                elif step:
                    names *= reductions
                assert calls.names == names, what
            assert_mean(ddp, alone, what)
            for net in (ddp, alone):
                if forget != "keep":
                    net.zero_grad(set_to_none=forget == "drop")


# Which parameters a backward reaches.


def unused_everywhere(net: Net, step: int) -> None:
    net(batch(), "abd").sum().backward()


def unused_on_one_rank(net: Net, step: int) -> None:
    net(batch(), "abc" if dist.get_rank() else "acdef").sum().backward()


def nothing_in_common(net: Net, step: int) -> None:
    net(batch(), "abc" if dist.get_rank() else "def").sum().backward()


def different_in_each_step(net: Net, step: int) -> None:
    names = ["ab", "cd", "ef", "ad"] if dist.get_rank() else ["ba", "ef", "f", "bce"]
    net(batch(), names[step]).sum().backward()


def used_outside_forward_too(net: Net, step: int) -> None:
    x = batch()
    loss = net(x, "ab").sum() + branch(net, "c")(x).sum() + branch(net, "a")(x).pow(2).sum()
    loss.backward()


def used_outside_forward_on_one_rank(net: Net, step: int) -> None:
    x = batch()
    loss = net(x, "ab").sum()
    if dist.get_rank():
        loss = loss + branch(net, "c")[0].weight.pow(2).sum()
    loss.backward()


def used_outside_forward_only(net: Net, step: int) -> None:
    net(batch(), "ab")
    branch(net, "c")(batch()).sum().backward()


def loss_without_any_forward(net: Net, step: int) -> None:
    net.module.branches["c"](batch()).sum().backward()


def same_parameter_many_times(net: Net, step: int) -> None:
    net(batch(), "aabaa" if step % 2 else "bab").sum().backward()


def loss_reaches_nothing_on_one_rank(net: Net, step: int) -> None:
    net(batch(), "" if dist.get_rank() == step % 2 else "abc").sum().backward()


def loss_reaches_nothing_on_any_rank(net: Net, step: int) -> None:
    net(batch(), "").sum().backward()


def outputs_ignored_by_the_loss(net: Net, step: int) -> None:
    outputs = net(batch(), "abcd")
    sum(outputs[name][0].sum() for name in "bd").backward()


def different_outputs_ignored_on_each_rank(net: Net, step: int) -> None:
    outputs = net(batch(), "abcdef")
    names = ["ab", "c", "ef", "abcdef"][(step + dist.get_rank()) % 4]
    sum(outputs[name][0].sum() for name in names).backward()


def only_the_second_field_of_a_dataclass(net: Net, step: int) -> None:
    net(batch(), "ab").second[dist.get_rank()].sum().backward()


class NoGradient(torch.autograd.Function):
    """A function of a parameter that has no gradient to give, on some ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gives: bool) -> Tensor:
        ctx.gives = gives
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.new_full((4, 4), grad.sum().item()) if ctx.gives else None, None


def custom_function_gives_none_on_one_rank(net: Net, step: int) -> None:
    weight = branch(net, "c")[0].weight
    NoGradient.apply(net(batch(), "ab"), weight, dist.get_rank() == 1).sum().backward()


def custom_function_gives_none_on_all_ranks(net: Net, step: int) -> None:
    weight = branch(net, "c")[0].weight
    NoGradient.apply(net(batch(), "ab"), weight, False).sum().backward()


# Several backwards.


def same_graph_twice(net: Net, step: int) -> None:
    loss = net(batch(), "abc").sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses_of_one_graph(net: Net, step: int) -> None:
    outputs = net(batch(), "abcd")
    outputs["a"][0].sum().backward(retain_graph=True)
    (outputs["a"][0].pow(2).sum() + outputs["c"][0].sum()).backward()


def two_forwards_then_two_backwards(net: Net, step: int) -> None:
    losses = [net(batch(), "abc").sum(), net(batch(), "cde").sum()]
    for loss in losses:
        loss.backward()


def two_forwards_then_two_backwards_in_reverse(net: Net, step: int) -> None:
    losses = [net(batch(), "abc").sum(), net(batch(), "cde").sum()]
    for loss in reversed(losses):
        loss.backward()


def two_forwards_then_one_backward(net: Net, step: int) -> None:
    (net(batch(), "abc").sum() + net(batch(), "cde").sum()).backward()


def forward_of_the_output(net: Net, step: int) -> None:
    net(net(net(batch(), "ab"), ""), "bc").sum().backward()


def forward_without_backward(net: Net, step: int) -> None:
    net(batch(), "abc")
    with torch.no_grad():
        net(batch(), "abc")
    net(batch(), "ab").sum().backward()


def backward_with_respect_to_some(net: Net, step: int) -> None:
    weights = [branch(net, "a")[0].weight, branch(net, "c")[0].bias]
    net(batch(), "abc").sum().backward(inputs=weights)


# torch.autograd.grad


def gradient_of_the_input(net: Net, step: int) -> None:
    x = batch()
    loss = net(x, "abc").pow(2).sum()
    assert torch.autograd.grad(loss, x, retain_graph=True)[0].shape == x.shape
    loss.backward()


def gradient_of_parameters(net: Net, step: int) -> None:
    loss = net(batch(), "abc").pow(2).sum()
    weights = list(branch(net, "b").parameters())
    torch.autograd.grad(loss, weights, retain_graph=True)
    torch.autograd.grad(net(batch(), "abc").sum(), list(net.parameters()), allow_unused=True)
    loss.backward()


def gradient_of_another_output(net: Net, step: int) -> None:
    first, second = net(batch(), "abc").pow(2), net(batch(), "de")
    torch.autograd.grad(second.sum(), first, retain_graph=True, allow_unused=True)
    (first.sum() + second.sum()).backward()


def gradient_between_no_sync_and_backward(net: Net, step: int) -> None:
    with net.no_sync():
        net(batch(), "ac").sum().backward()
        x = batch()
        torch.autograd.grad(net(x, "bd").sum(), x)
    x = batch()
    torch.autograd.grad(net(x, "ef").sum(), x)
    net(batch(), "b").sum().backward()


def gradient_penalty(net: Net, step: int) -> None:
    x = batch()
    output = net(x, "abc")
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.mean() + (gradient.norm() - 1).pow(2)).backward()


def backward_that_builds_a_graph(net: Net, step: int) -> None:
    with warnings.catch_warnings():  # of a reference cycle, which the test runner collects
        warnings.simplefilter("ignore")
        net(batch(), "abc").pow(2).sum().backward(create_graph=True)


def penalty_alone(net: Net, step: int) -> None:
    x = batch()
    (gradient,) = torch.autograd.grad(net(x, "abc").sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


def autograd_grad_alone(net: Net, step: int) -> None:
    x = batch()
    torch.autograd.grad(net(x, "abc").sum(), x)
    torch.autograd.grad(net(batch(False), "abc").sum(), list(branch(net, "a").parameters()))


# no_sync


def no_sync_around_all_of_the_earlier_ones(net: Net, step: int) -> None:
    with net.no_sync():
        for _ in range(2):
            net(batch(), "abc").sum().backward()
    net(batch(), "abc").sum().backward()


def no_sync_around_the_forward(net: Net, step: int) -> None:
    with net.no_sync():
        loss = net(batch(), "abc").sum()
    loss.backward()


def no_sync_around_the_backward(net: Net, step: int) -> None:
    loss = net(batch(), "abc").sum()
    with net.no_sync():
        loss.backward()
    net(batch(), "bcd").sum().backward()


def used_in_an_earlier_microbatch_only(net: Net, step: int) -> None:
    with net.no_sync():
        net(batch(), "abc").sum().backward()
        net(batch(), "d").sum().backward()
    net(batch(), "e").sum().backward()


def used_in_an_earlier_microbatch_of_one_rank(net: Net, step: int) -> None:
    with net.no_sync():
        net(batch(), "abc" if dist.get_rank() else "d").sum().backward()
    net(batch(), "e" if dist.get_rank() else "ea").sum().backward()


def nothing_in_the_last_microbatch(net: Net, step: int) -> None:
    with net.no_sync():
        net(batch(), "abc" if dist.get_rank() else "ad").sum().backward()
    net(batch(), "").sum().backward()


def no_sync_in_the_middle_of_a_graph(net: Net, step: int) -> None:
    loss = net(batch(), "abc").sum()
    with net.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()


def more_microbatches_on_one_rank(net: Net, step: int) -> None:
    with net.no_sync():
        for _ in range(1 + 2 * dist.get_rank()):
            net(batch(), "abd").sum().backward()
    net(batch(), "ab").sum().backward()


def flag_set_by_hand(net: Net, step: int) -> None:
    net.require_backward_grad_sync = False
    net(batch(), "abc").sum().backward()
    loss = net(batch(), "cd").sum()
    net.require_backward_grad_sync = True
    loss.backward()


def exception_inside_no_sync(net: Net, step: int) -> None:
    with contextlib.suppress(ZeroDivisionError), net.no_sync():
        net(batch(), "abc").sum().backward()
        raise ZeroDivisionError
    net(batch(), "cd").sum().backward()


ONE_REDUCTION: dict[Scenario, Callable[[], nn.Module]] = {
    unused_everywhere: Branches,
    unused_on_one_rank: Branches,
    nothing_in_common: Branches,
    different_in_each_step: Branches,
    used_outside_forward_too: Branches,
    used_outside_forward_on_one_rank: Branches,
    used_outside_forward_only: Branches,
    loss_without_any_forward: Branches,
    same_parameter_many_times: Branches,
    loss_reaches_nothing_on_one_rank: Branches,
    loss_reaches_nothing_on_any_rank: Branches,
    outputs_ignored_by_the_loss: Heads,
    different_outputs_ignored_on_each_rank: Heads,
    only_the_second_field_of_a_dataclass: DataclassOutput,
    custom_function_gives_none_on_one_rank: Branches,
    custom_function_gives_none_on_all_ranks: Branches,
    two_forwards_then_one_backward: Branches,
    forward_of_the_output: Branches,
    forward_without_backward: Branches,
    backward_with_respect_to_some: Branches,
    gradient_of_the_input: Branches,
    gradient_of_parameters: Branches,
    gradient_of_another_output: Branches,
    gradient_between_no_sync_and_backward: Branches,
    gradient_penalty: Branches,
    backward_that_builds_a_graph: Branches,
    penalty_alone: Branches,
    no_sync_around_all_of_the_earlier_ones: Branches,
    no_sync_around_the_forward: Branches,
    no_sync_around_the_backward: Branches,
    used_in_an_earlier_microbatch_only: Branches,
    used_in_an_earlier_microbatch_of_one_rank: Branches,
    nothing_in_the_last_microbatch: Branches,
    no_sync_in_the_middle_of_a_graph: Branches,
    more_microbatches_on_one_rank: Branches,
    flag_set_by_hand: Branches,
    exception_inside_no_sync: Branches,
}
TWO_REDUCTIONS: dict[Scenario, Callable[[], nn.Module]] = {
    same_graph_twice: Branches,
    two_losses_of_one_graph: Heads,
    two_forwards_then_two_backwards: Branches,
    two_forwards_then_two_backwards_in_reverse: Branches,
}


def named(scenarios: dict[Scenario, Any]) -> Any:
    return pytest.mark.parametrize("name", [scenario.__name__ for scenario in scenarios])


def by_name(scenarios: dict[Scenario, Any], name: str) -> tuple[Scenario, nn.Module]:
    return next((s, model()) for s, model in scenarios.items() if s.__name__ == name)


@VIEW
@named(ONE_REDUCTION)
@ranks(2)
def test_mean_of_what_each_rank_computes_in_one_reduction(name: str, view: bool) -> None:
    scenario, model = by_name(ONE_REDUCTION, name)
    check(scenario, view, model)


@VIEW
@named(TWO_REDUCTIONS)
@ranks(2)
def test_mean_of_what_each_rank_computes_in_two_reductions(name: str, view: bool) -> None:
    scenario, model = by_name(TWO_REDUCTIONS, name)
    check(scenario, view, model, reductions=2)


@VIEW
@ranks(2)
def test_autograd_grad_alone_starts_no_reduction(view: bool) -> None:
    ddp = DistributedDataParallel(Branches(), gradient_as_bucket_view=view)
    with recorded_collectives() as calls:
        for step in range(3):
            autograd_grad_alone(ddp, step)
    assert not calls.names
    assert ddp.reducer.counters.reductions == 0
    assert all(param.grad is None for param in ddp.parameters())


def one_layer_twice(net: Net, step: int) -> None:
    net(batch(), "aabcba").sum().backward()


def layers_differ_by_step_and_rank(net: Net, step: int) -> None:
    names = ["ab", "aab", "b", "aba"] if dist.get_rank() else ["aba", "bb", "ab", "a"]
    net(batch(), names[step]).sum().backward()


def accumulated(net: Net, step: int) -> None:
    with net.no_sync():
        net(batch(), "aab").sum().backward()
    net(batch(), "ba").sum().backward()


@VIEW
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("scenario", [one_layer_twice, layers_differ_by_step_and_rank, accumulated])
@ranks(2)
def test_checkpointed_layers_give_the_mean(scenario: Scenario, reentrant: bool, view: bool) -> None:
    # A reentrant layer that is new in a later step has an error of its own, tested below.
    if scenario is layers_differ_by_step_and_rank and reentrant:
        check(lambda net, step: scenario(net, 1 + step % 2 * 2), view, Checkpointed(reentrant))
    else:
        check(scenario, view, Checkpointed(reentrant))


def checkpoint_behind(net: Net) -> None:
    output = net(batch(), "ab")
    (output + checkpoint(branch(net, "c"), output, use_reentrant=True)).sum().backward()


def checkpoint_in_front(net: Net) -> None:
    net(checkpoint(branch(net, "c"), batch(), use_reentrant=True), "ab").sum().backward()


def train_from_the_second_step_on(
    ddp: DistributedDataParallel, step: Callable[[Net], None], error: str | None
) -> None:
    alone = Alone(copy.deepcopy(ddp.module))
    ddp(batch(), "ab").sum().backward()
    for number in range(4):
        for net in (ddp, alone):
            net.zero_grad()
            torch.manual_seed(10 * number + dist.get_rank())
            if number == 0 and error is not None and net is ddp:
                with pytest.raises(RuntimeError, match=error):
                    step(net)
            else:
                step(net)
        if number or error is None:
            assert_mean(ddp, alone, f"step {number}")


@VIEW
@ranks(2)
def test_reentrant_checkpoint_that_is_new_but_in_time_is_reduced(view: bool) -> None:
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    train_from_the_second_step_on(ddp, checkpoint_behind, None)


@VIEW
@ranks(2)
def test_reentrant_checkpoint_that_is_new_and_late_is_named_and_then_waited_for(
    view: bool,
) -> None:
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    error = r"rank \d.*'branches.c.*use_reentrant=False"
    train_from_the_second_step_on(ddp, checkpoint_in_front, error)


@VIEW
@ranks(3)
def test_gradients_nobody_used_stay_bit_for_bit(view: bool) -> None:
    """None stays None; another one keeps its bits, and in copy mode stays the same tensor."""
    ddp = DistributedDataParallel(Branches(), gradient_as_bucket_view=view)
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
    ddp = DistributedDataParallel(Branches(), gradient_as_bucket_view=view)
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
    for odd in (
        lambda: torch.arange(16.0).view(4, 4).t(),
        lambda: torch.tensor(3.0).expand(4, 4),
        lambda: torch.arange(32.0).view(4, 8)[:, ::2],
    ):
        ddp = DistributedDataParallel(Branches(), gradient_as_bucket_view=view)
        alone = Alone(copy.deepcopy(ddp.module))
        for step in range(3):
            seed = 10 * step + dist.get_rank()
            for net in (ddp, alone):
                net.zero_grad()
                torch.manual_seed(seed)
                if dist.get_rank() == 0:
                    branch(net, "c")[0].weight.grad = odd()
                net(batch(), "abc" if dist.get_rank() else "ab").sum().backward()
            assert_mean(ddp, alone, f"step {step}")


@VIEW
@pytest.mark.parametrize("offenders", [[0, 1], [1]], ids=["all ranks", "one rank"])
@ranks(2)
def test_strict_mode_raises_at_the_next_forward_and_then_goes_on(
    offenders: list[int], view: bool
) -> None:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(
        Branches(), find_unused_parameters=False, gradient_as_bucket_view=view
    )
    alone = Alone(copy.deepcopy(ddp.module))
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
        for net in (ddp, alone):
            net.zero_grad()
            torch.manual_seed(step)
            net(batch(), "abcdef").sum().backward()
        assert_mean(ddp, alone, f"step {step} after the error")


@ranks(2)
def test_automatic_mode_is_the_default_and_what_true_means() -> None:
    for option in ({}, {"find_unused_parameters": None}, {"find_unused_parameters": True}):
        ddp = DistributedDataParallel(Branches(), **option)
        for _ in range(3):
            with recorded_collectives() as calls:
                ddp(batch(), "a").sum().backward()
        assert calls.names == ["all_reduce"] * len(ddp.reducer.buckets)


@VIEW
@ranks(2)
def test_gan_alternation_gives_the_mean(view: bool) -> None:
    """Two wrapped models, one frozen in effect: its gradients are dropped, not its part."""
    torch.manual_seed(0)
    models = [Branches(), Branches()]
    alone = [Alone(copy.deepcopy(model)) for model in models]
    ddps = [DistributedDataParallel(model, gradient_as_bucket_view=view) for model in models]

    def step(generator: Net, judge: Net, seed: int) -> None:
        for net in (generator, judge):
            net.zero_grad()
        torch.manual_seed(seed + dist.get_rank())
        fake = generator(batch(), "ab")
        (judge(fake.detach(), "ab").sum() - judge(batch(), "ab").sum()).backward()
        judge(fake, "ab").pow(2).sum().backward()

    for seed in range(0, 40, 10):
        step(*ddps, seed)
        step(*alone, seed)
        for ddp, own in zip(ddps, alone, strict=True):
            assert_mean(ddp, own, f"seed {seed}")


@VIEW
@pytest.mark.parametrize("seed", [1, 2, 3])
@ranks(3)
def test_random_windows_of_random_branches(seed: int, view: bool) -> None:
    """Windows whose shape all ranks share, and whose branches each rank chooses alone."""
    shared, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    ddp = DistributedDataParallel(
        Branches(), gradient_as_bucket_view=view, bucket_cap_mb=shared.choice([1e-6, 3e-4, None])
    )
    alone = Alone(copy.deepcopy(ddp.module))
    history = []
    for window in range(25):
        microbatches = []
        for _ in range(shared.choice([1, 1, 2, 3])):
            names = "".join(own.sample("abcdef", own.choice([0, 1, 2, 5])))
            microbatches.append((names, own.random() < 0.5, shared.random() < 0.2))
        history.append(microbatches)
        for net in (ddp, alone):
            torch.manual_seed(window * 10 + dist.get_rank())
            for number, (names, forward_inside, twice) in enumerate(microbatches):
                last = number == len(microbatches) - 1
                with net.no_sync() if forward_inside else contextlib.nullcontext():
                    loss = net(batch(), names).sum()
                with contextlib.nullcontext() if last else net.no_sync():
                    if twice:
                        loss.backward(retain_graph=True)
                    loss.backward()
        assert_mean(ddp, alone, f"window {window}, {history[-3:]}")
        forget = shared.choice(["drop", "zero", "keep"])
        if forget != "keep" or window % 5 == 4:
            for net in (ddp, alone):
                net.zero_grad(set_to_none=forget != "zero")


@VIEW
@ranks(2)
def test_used_under_no_sync_then_dropped_by_zero_grad_and_unused_here(view: bool) -> None:
    """A parameter may count as used on this rank and have no gradient all the same."""
    ddp = DistributedDataParallel(Branches(), gradient_as_bucket_view=view)
    alone = Alone(copy.deepcopy(ddp.module))
    for step in range(3):
        for net in (ddp, alone):
            torch.manual_seed(10 * step + dist.get_rank())
            net.zero_grad()
            with net.no_sync():
                net(batch(), "abcdef").sum().backward()
            net.zero_grad()
            net(batch(), "abc" if dist.get_rank() == 0 else "abcd").sum().backward()
        assert_mean(ddp, alone, f"step {step}")


class Tagged(torch.Tensor):
    """A subclass with the default ``__torch_function__``."""


@VIEW
@ranks(2)
def test_parameters_of_a_tensor_subclass_are_synchronised(view: bool) -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Tagged))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    plain = nn.Linear(4, 4)
    plain.load_state_dict({k: v.as_subclass(Tensor) for k, v in model.state_dict().items()})
    alone = Alone(plain)
    for step in range(3):
        for net in (ddp, alone):
            torch.manual_seed(10 * step + dist.get_rank())
            net.zero_grad()
            net(batch()).pow(2).sum().backward()
        assert_mean(ddp, alone, f"step {step}")


@VIEW
@ranks(2)
def test_a_parameter_that_changes_its_dtype_is_an_error_that_names_it(view: bool) -> None:
    ddp = DistributedDataParallel(Branches(), gradient_as_bucket_view=view)
    ddp(batch(), "abcdef").sum().backward()
    ddp.zero_grad()
    ddp.double()
    with pytest.raises(RuntimeError, match=r"'branches\..*float32.*is now torch.float64.*wrap"):
        ddp(batch().double(), "abcdef")
