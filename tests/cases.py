"""The table of cases: what people do with a wrapped model, and what must give the right gradients.

A case is a function ``step(net, rank, step)`` that runs one training step up to the gradients. It
gets the wrapped model (or, for the oracle, an unwrapped one with the same methods), draws its data
from torch's generator, and must use nothing else that differs between ranks but ``rank``. To add
one, write it under the point of the list that it belongs to:

    @case(model=Branches)
    def last_branch_is_unused(net, rank, step):
        net(batch(), "abcde").sum().backward()

``test_nothing_to_know.py`` runs each in all variants against the oracle, and
``docs/differences.md`` names each.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import Net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tritonddp import DistributedDataParallel

Step = Callable[[Any, int, int], None]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        step: one training step, without the optimizer.
        models: make the modules to be wrapped, each by itself; ``step`` gets the one net, or the
            list of nets if there are several.
        reductions: how often a step reduces each of them.
        options: for the wrapper.
        weighted: the reduction that its backwards are weighted with, if they are.
        requests: how often a step calls ``reduce_gradients``.
        names_params: whether these calls say which parameters, which the ranks verify.
        adds: the steps in which parameters are added or replaced.
    """

    step: Step
    models: Callable[[], list[nn.Module]]
    reductions: tuple[int, ...] = (1,)
    options: dict[str, Any] = field(default_factory=dict)
    weighted: str | None = None
    requests: int = 0
    names_params: bool = False
    adds: Collection[int] = ()


CASES: dict[str, Case] = {}


def case(
    *models: Callable[[], nn.Module],
    model: Callable[[], nn.Module] | None = None,
    reductions: int | tuple[int, ...] = 1,
    weighted: str | None = None,
    requests: int = 0,
    names_params: bool = False,
    adds: Collection[int] = (),
    **options: Any,
) -> Callable[[Step], Step]:
    """Decorator: the function is a case of the table."""
    makers = models or (model or Branches,)
    counts = reductions if isinstance(reductions, tuple) else (reductions,) * len(makers)

    def decorate(step: Step) -> Step:
        assert step.__name__ not in CASES, f"two cases are called {step.__name__}"
        CASES[step.__name__] = Case(
            step,
            lambda: [make() for make in makers],
            counts,
            options,
            weighted,
            requests,
            names_params,
            adds,
        )
        return step

    return decorate


# The models. `microbatch` is the loss of a microbatch that a variant puts in front of a backward:
# each rank uses other parameters, and none uses the last ones.


def batch(requires_grad: bool = True) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=requires_grad)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Branches(nn.Module):
    """Runs the branches it is told to, each a small network, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: small() for name in "abcdef"})

    def forward(self, x: Tensor, names: str) -> Any:
        for name in names:
            x = x + self.branches[name](x)
        return x * 2

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch(), "ace" if rank else "bd").sum()


class Heads(Branches):
    """Returns the branches' outputs side by side instead."""

    def forward(self, x: Tensor, names: str) -> Any:
        return {name: [self.branches[name](x)] for name in names}

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        outputs = net(batch(), "ace" if rank else "bd")
        return sum(head[0].sum() for head in outputs.values())


@dataclass
class Outputs:
    first: Tensor
    second: tuple[Tensor, ...]


class DataclassOutput(Branches):
    def forward(self, x: Tensor, names: str) -> Any:
        return Outputs(x.cos(), tuple(self.branches[name](x) for name in names))

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch(), "ab").second[rank % 2].sum()


class Checkpointed(Branches):
    """Checkpoints each branch."""

    reentrant = True

    def forward(self, x: Tensor, names: str) -> Any:
        for name in names:
            x = x + checkpoint(self.branches[name], x, use_reentrant=self.reentrant)
        return x * 2


class CheckpointedNotReentrant(Checkpointed):
    reentrant = False


class CheckpointedLater(Checkpointed):
    """Runs as it is until ``checkpointed`` is set."""

    checkpointed = False

    def forward(self, x: Tensor, names: str) -> Any:
        return super().forward(x, names) if self.checkpointed else Branches.forward(self, x, names)


class Experts(nn.Module):
    """A mixture of experts: each row of the batch goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 8)
        self.experts = nn.ModuleList(small() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                outputs = outputs.index_put((rows,), expert(x[rows]))
        return x + weight.unsqueeze(-1) * outputs

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch()).pow(2).sum()


class StochasticDepth(nn.Module):
    """Skips each of its layers every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(small() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = x + layer(x)
        return x

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch()).pow(2).sum()


class Towers(nn.Module):
    """An image tower and a text tower; a batch is of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(
            {kind: nn.Sequential(small(), nn.LayerNorm(4), small()) for kind in ("image", "text")}
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, kind: str) -> Tensor:
        return self.towers[kind](x) * self.scale

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch(), "text").pow(2).sum()


class Normalised(nn.Module):
    """BatchNorm, with statistics that are not those of the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
        self.layers[1].running_mean.normal_()
        self.layers[1].running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch()).pow(2).sum()


class NormalisedAsInEval(Normalised):
    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def train(self, mode: bool = True) -> NormalisedAsInEval:
        return super().train(False)  # a fine-tuned backbone often keeps its statistics like this


class Multiplied(nn.Module):
    """A buffer is a factor of the loss, so that the graph keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.rand(4) + 0.5)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.factor

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch()).pow(2).sum()


def branch(net: Net, name: str) -> nn.Module:
    return net.module.branches[name]


# 1. Unused parameters, no flag.


@case()
def unused_everywhere(net: Net, rank: int, step: int) -> None:
    net(batch(), "abd").sum().backward()


@case()
def unused_on_one_rank(net: Net, rank: int, step: int) -> None:
    net(batch(), "abc" if rank else "acdef").sum().backward()


@case()
def nothing_in_common(net: Net, rank: int, step: int) -> None:
    net(batch(), ["def", "abc", ""][rank]).sum().backward()


@case()
def different_on_each_rank_and_step(net: Net, rank: int, step: int) -> None:
    names = ["ba", "ef", "f", "bce", "ab", "cd", "ef", "ad"]
    net(batch(), names[(step + 3 * rank) % 8]).sum().backward()


@case(model=Experts)
def mixture_of_experts(net: Net, rank: int, step: int) -> None:
    net(batch()).pow(2).sum().backward()


@case(model=StochasticDepth)
def skipped_layers(net: Net, rank: int, step: int) -> None:
    net(batch()).pow(2).sum().backward()


@case(model=Towers)
def whole_submodule_unused_on_some_ranks(net: Net, rank: int, step: int) -> None:
    net(batch(), "image" if rank == step % 2 else "text").pow(2).sum().backward()


@case(model=Towers)
def whole_submodule_unused_for_some_steps(net: Net, rank: int, step: int) -> None:
    net(batch(), "image" if step % 2 else "text").pow(2).sum().backward()


@case(find_unused_parameters=True)
def unused_with_the_flag_of_stock(net: Net, rank: int, step: int) -> None:
    net(batch(), "abc" if rank else "acd").sum().backward()


@case(static_graph=True)
def unused_with_static_graph(net: Net, rank: int, step: int) -> None:
    net(batch(), "abc" if rank else "acd").sum().backward()


@case()
def same_parameter_many_times(net: Net, rank: int, step: int) -> None:
    net(batch(), "aabaa" if step % 2 else "bab").sum().backward()


class NoGradient(torch.autograd.Function):
    """A function of a parameter that has no gradient to give, on some ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gives: bool) -> Tensor:
        ctx.gives = gives
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.new_full((4, 4), grad.sum().item()) if ctx.gives else None, None


@case()
def custom_function_gives_none_on_one_rank(net: Net, rank: int, step: int) -> None:
    weight = branch(net, "c")[0].weight
    NoGradient.apply(net(batch(), "ab"), weight, rank == 1).sum().backward()


@case()
def custom_function_gives_none_on_all_ranks(net: Net, rank: int, step: int) -> None:
    weight = branch(net, "c")[0].weight
    NoGradient.apply(net(batch(), "ab"), weight, False).sum().backward()


@case()
def backward_with_respect_to_some(net: Net, rank: int, step: int) -> None:
    weights = [branch(net, "a")[0].weight, branch(net, "c")[0].bias]
    net(batch(), "abc").sum().backward(inputs=weights)


# 2. Outputs that the loss ignores, parameters used outside forward.


@case(model=Heads)
def outputs_ignored_by_the_loss(net: Net, rank: int, step: int) -> None:
    outputs = net(batch(), "abcd")
    sum(outputs[name][0].sum() for name in "bd").backward()


@case(model=Heads)
def different_outputs_ignored_on_each_rank(net: Net, rank: int, step: int) -> None:
    outputs = net(batch(), "abcdef")
    names = ["ab", "c", "ef", "abcdef"][(step + rank) % 4]
    sum(outputs[name][0].sum() for name in names).backward()


@case(model=DataclassOutput)
def only_the_second_field_of_a_dataclass(net: Net, rank: int, step: int) -> None:
    net(batch(), "ab").second[rank % 2].sum().backward()


@case()
def used_outside_forward_too(net: Net, rank: int, step: int) -> None:
    x = batch()
    loss = net(x, "ab").sum() + branch(net, "c")(x).sum() + branch(net, "a")(x).pow(2).sum()
    loss.backward()


@case()
def used_outside_forward_on_one_rank(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "ab").sum()
    if rank:
        loss = loss + branch(net, "c")[0].weight.pow(2).sum()
    loss.backward()


@case()
def used_outside_forward_only(net: Net, rank: int, step: int) -> None:
    net(batch(), "ab")
    branch(net, "c")(batch()).sum().backward()


@case()
def loss_without_any_forward(net: Net, rank: int, step: int) -> None:
    branch(net, "c")(batch()).sum().backward()


@case()
def penalty_on_all_weights(net: Net, rank: int, step: int) -> None:
    penalty = sum(param.pow(2).sum() for param in net.parameters())
    (net(batch(), "ab").pow(2).mean() + 0.1 * penalty).backward()


@case()
def forward_of_the_output(net: Net, rank: int, step: int) -> None:
    net(net(net(batch(), "ab"), ""), "bc").sum().backward()


# 3. Several backwards.


@case(reductions=2)
def same_graph_twice(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "abc").sum()
    loss.backward(retain_graph=True)
    loss.backward()


@case(model=Heads, reductions=2)
def two_losses_of_one_graph(net: Net, rank: int, step: int) -> None:
    outputs = net(batch(), "abcd")
    outputs["a"][0].sum().backward(retain_graph=True)
    (outputs["a"][0].pow(2).sum() + outputs["c"][0].sum()).backward()


@case(model=Heads, reductions=2)
def two_losses_that_share_a_trunk(net: Net, rank: int, step: int) -> None:
    trunk = branch(net, "f")(batch())
    outputs = net(trunk, "ab")
    outputs["a"][0].pow(2).sum().backward(retain_graph=True)
    outputs["b"][0].pow(2).sum().backward()


@case(reductions=2)
def two_forwards_then_two_backwards(net: Net, rank: int, step: int) -> None:
    losses = [net(batch(), "abc").sum(), net(batch(), "cde").sum()]
    for loss in losses:
        loss.backward()


@case(reductions=2)
def two_forwards_then_two_backwards_in_reverse(net: Net, rank: int, step: int) -> None:
    losses = [net(batch(), "abc").sum(), net(batch(), "cde").sum()]
    for loss in reversed(losses):
        loss.backward()


@case()
def two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    (net(batch(), "abc").sum() + net(batch(), "cde").sum()).backward()


@case(reductions=3)
def a_loss_per_microbatch(net: Net, rank: int, step: int) -> None:
    for names in ("abc", "cd" if rank else "ce", "ab"):
        net(batch(), names).pow(2).sum().backward()


@case(Branches, Branches, reductions=(1, 2))
def gan_alternation(nets: list[Net], rank: int, step: int) -> None:
    generator, judge = nets
    fake = generator(batch(), "ab")
    (judge(fake.detach(), "ab").sum() - judge(batch(), "ab").pow(2).sum()).backward()
    judge(fake, "ab").pow(2).sum().backward()


@case(Branches, Branches, reductions=1)
def gan_with_the_judge_frozen_for_the_generator(nets: list[Net], rank: int, step: int) -> None:
    generator, judge = nets
    fake = generator(batch(), "ab")
    (judge(fake.detach(), "ab").sum() - judge(batch(), "ab").pow(2).sum()).backward()
    with judge.no_sync():  # its own gradients of this loss are not wanted
        judged = judge(fake, "ab").pow(2).sum()
        judged.backward(inputs=list(generator.parameters()))


@case()
def forward_without_backward(net: Net, rank: int, step: int) -> None:
    net(batch(), "abc")
    with torch.no_grad():
        net(batch(), "abc")
    net(batch(), "ab").sum().backward()


# 4. no_sync around whatever part.


@case()
def no_sync_around_all_of_the_earlier_ones(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        for _ in range(2):
            net(batch(), "abc").sum().backward()
    net(batch(), "abc").sum().backward()


@case()
def no_sync_around_the_forward(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        loss = net(batch(), "abc").sum()
    loss.backward()


@case()
def no_sync_around_the_backward(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "abc").sum()
    with net.no_sync():
        loss.backward()
    net(batch(), "bcd").sum().backward()


@case(static_graph=True)
def no_sync_with_static_graph(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(batch(), "abc").sum().backward()
    net(batch(), "abc").sum().backward()


@case(static_graph=True)
def no_sync_around_the_forward_with_static_graph(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        losses = [net(batch(), "abc").sum() for _ in range(2)]
        losses[0].backward()
    losses[1].backward()


@case(static_graph=True)
def no_sync_around_the_backward_with_static_graph(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "abc").sum()
    with net.no_sync():
        loss.backward()
    net(batch(), "abc").sum().backward()


@case()
def used_in_an_earlier_microbatch_only(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(batch(), "abc").sum().backward()
        net(batch(), "d").sum().backward()
    net(batch(), "e").sum().backward()


@case()
def used_in_an_earlier_microbatch_of_one_rank(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(batch(), "abc" if rank else "d").sum().backward()
    net(batch(), "e" if rank else "ea").sum().backward()


@case(static_graph=True)
def used_in_an_earlier_microbatch_with_static_graph(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(batch(), "abc" if rank else "d").sum().backward()
    net(batch(), "e").sum().backward()


@case()
def nothing_in_the_last_microbatch(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(batch(), "abc" if rank else "ad").sum().backward()
    net(batch(), "").sum().backward()


@case()
def no_sync_in_the_middle_of_a_graph(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "abc").sum()
    with net.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()


@case()
def more_microbatches_on_one_rank(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        for _ in range(1 + 2 * rank):
            net(batch(), "abd").sum().backward()
    net(batch(), "ab").sum().backward()


@case()
def exception_inside_no_sync(net: Net, rank: int, step: int) -> None:
    with contextlib.suppress(ZeroDivisionError), net.no_sync():
        net(batch(), "abc").sum().backward()
        raise ZeroDivisionError
    net(batch(), "cd").sum().backward()


@case()
def flag_set_by_hand(net: Net, rank: int, step: int) -> None:
    """As nanoGPT does: before the forward of each microbatch."""
    for microbatch in range(3):
        net.require_backward_grad_sync = microbatch == 2
        net(batch(), "abc" if rank else "acd").sum().backward()


@case()
def flag_set_by_hand_between_forward_and_backward(net: Net, rank: int, step: int) -> None:
    net.require_backward_grad_sync = False
    net(batch(), "abc").sum().backward()
    loss = net(batch(), "cd").sum()
    net.require_backward_grad_sync = True
    loss.backward()


@case()
def accelerate_accumulates(net: Net, rank: int, step: int) -> None:
    """``accelerator.accumulate(model)``: forward, backward and step lie inside; the last one
    enters a context that does nothing."""
    for microbatch in range(3):
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.nullcontext() if microbatch == 2 else net.no_sync())
            net(batch(), "ab" if rank else "bc").sum().backward()


class TrainsInside(Branches):
    """Runs its own backward, as a LightningModule with manual optimization: Lightning makes the
    wrapper's ``forward`` run ``training_step``, and that calls ``manual_backward``."""

    def forward(self, x: Tensor, names: str, backward: bool = True) -> Any:
        loss = super().forward(x, names).sum()
        if backward:
            self.manual_backward(loss)
            return None
        return loss

    def manual_backward(self, loss: Tensor) -> None:
        loss.backward()

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch(), "ace" if rank else "bd", backward=False)


@case(model=TrainsInside)
def lightning_runs_the_backward_inside_forward(net: Net, rank: int, step: int) -> None:
    net(batch(), "ab" if rank else "bc")
    net.require_backward_grad_sync = True  # as its strategy does after each training_step


@case(model=TrainsInside)
def lightning_blocks_the_synchronisation(net: Net, rank: int, step: int) -> None:
    """``block_backward_sync()`` of the strategy, around a whole training_step."""
    with net.no_sync():
        net(batch(), "ab" if rank else "bc")
    net(batch(), "cd" if rank else "b")


class PreparesInside(TrainsInside):
    """As above; before each ``manual_backward`` Lightning calls the reducer of the wrapper, and
    after ``training_step`` it sees that the end of the wrapper's forward does not."""

    wrapper: list[Net]

    def manual_backward(self, loss: Tensor) -> None:
        net: Any = self.wrapper[0]
        if isinstance(net, nn.parallel.DistributedDataParallel):
            net.require_forward_param_sync = net.require_backward_grad_sync
            if net.require_backward_grad_sync:
                net.reducer._rebuild_buckets()
                net.reducer.prepare_for_backward([loss] if net.find_unused_parameters else [])
        loss.backward()
        net.require_backward_grad_sync = False


@case(model=PreparesInside)
def lightning_prepares_the_reducer(net: Net, rank: int, step: int) -> None:
    net.module.wrapper = [net]  # in a list: it is no submodule
    net(batch(), "abcdef")
    net.require_backward_grad_sync = True


@case()
def accelerate_triggers_the_synchronisation(net: Net, rank: int, step: int) -> None:
    """``accelerator.trigger_sync_in_backward(model)``, around the last of several backwards."""
    with net.no_sync():
        losses = [net(batch(), "abcdef").sum() for _ in range(3)]
        for loss in losses[:2]:
            loss.backward()
    if not isinstance(net, nn.parallel.DistributedDataParallel):
        losses[2].backward()
        return
    before = net.require_backward_grad_sync, net.require_forward_param_sync
    net.require_backward_grad_sync = net.require_forward_param_sync = True
    net.reducer.prepare_for_backward([])
    losses[2].backward()
    net.require_backward_grad_sync, net.require_forward_param_sync = before


@case(reductions=2)
def reducer_prepared_between_two_losses(net: Net, rank: int, step: int) -> None:
    """As several losses of one graph are written for stock."""
    output = net(batch(), "abcdef")
    output.sum().backward(retain_graph=True)
    if isinstance(net, nn.parallel.DistributedDataParallel):
        net.reducer._rebuild_buckets()
        net.reducer.prepare_for_backward([])
    output.pow(2).sum().backward()


# 5. Reentrant checkpoints.


@case(model=Checkpointed)
def reentrant_checkpoint_of_one_layer_twice(net: Net, rank: int, step: int) -> None:
    net(batch(), "aabcba").sum().backward()


@case(model=Checkpointed)
def reentrant_checkpoints_that_differ_by_step_and_rank(net: Net, rank: int, step: int) -> None:
    names = ["aab", "aba"] if rank else ["bb", "a"]
    net(batch(), names[step % 2] if step else "aabb").sum().backward()


@case(model=Checkpointed)
def reentrant_checkpoints_under_no_sync(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(batch(), "aab").sum().backward()
    net(batch(), "ba").sum().backward()


@case(model=Checkpointed, static_graph=True)
def reentrant_checkpoint_with_static_graph(net: Net, rank: int, step: int) -> None:
    net(batch(), "aabcba").sum().backward()


@case(model=Checkpointed, reductions=2)
def two_losses_behind_reentrant_checkpoints(net: Net, rank: int, step: int) -> None:
    losses = [net(batch(), "aab").sum(), net(batch(), "ab").pow(2).sum()]
    for loss in losses:
        loss.backward()


@case(model=CheckpointedNotReentrant)
def checkpoint_of_one_layer_twice(net: Net, rank: int, step: int) -> None:
    net(batch(), "aabcba").sum().backward()


@case(model=CheckpointedNotReentrant)
def checkpoints_that_differ_by_step_and_rank(net: Net, rank: int, step: int) -> None:
    names = ["ab", "aab", "b", "aba"] if rank else ["aba", "bb", "ab", "a"]
    net(batch(), names[step]).sum().backward()


@case(model=Checkpointed)
def not_reentrant_first_and_reentrant_later(net: Net, rank: int, step: int) -> None:
    net.module.reentrant = step > 0
    net(batch(), "aabcba").sum().backward()


@case(model=CheckpointedLater)
def not_checkpointed_first_and_reentrant_later(net: Net, rank: int, step: int) -> None:
    net.module.checkpointed = step > 0
    net(batch(), "aabcba").sum().backward()


# 6. Parameters that are frozen, unfrozen, replaced or added after wrapping.


@case()
def frozen_in_turns(net: Net, rank: int, step: int) -> None:
    branch(net, "a").requires_grad_(step % 2 == 0)
    branch(net, "b").requires_grad_(step % 2 == 1)
    net(batch(), "abcdef").sum().backward()


@case()
def frozen_in_turns_and_unused_on_one_rank(net: Net, rank: int, step: int) -> None:
    branch(net, "a").requires_grad_(step % 2 == 0)
    net(batch(), "abc" if rank else "de").sum().backward()


@case(model=lambda: partly_frozen(Branches()), adds=[1])
def frozen_when_wrapped_and_unfrozen_later(net: Net, rank: int, step: int) -> None:
    branch(net, "a").requires_grad_(step > 0)
    net(batch(), "abcdef").sum().backward()


@case(model=lambda: partly_frozen(Branches()), adds=[1])
def unfrozen_and_used_on_one_rank(net: Net, rank: int, step: int) -> None:
    branch(net, "a").requires_grad_(step > 0)
    net(batch(), "abc" if rank else "bcd").sum().backward()


@case(Branches, Branches, reductions=(1, 2))
def gan_with_the_judge_frozen_by_requires_grad(nets: list[Net], rank: int, step: int) -> None:
    generator, judge = nets
    fake = generator(batch(), "abcdef")
    judge.requires_grad_(True)
    (judge(fake.detach(), "abcdef").sum() - judge(batch(), "abcdef").pow(2).sum()).backward()
    judge.requires_grad_(False)
    judge(fake, "abcdef").pow(2).sum().backward()


@case()
def frozen_between_forward_and_backward(net: Net, rank: int, step: int) -> None:
    net.requires_grad_(True)
    loss = net(batch(), "abcdef").sum()
    branch(net, "a").requires_grad_(False)
    loss.backward()


@case()
def frozen_inside_a_window(net: Net, rank: int, step: int) -> None:
    """What its microbatches accumulated before is reduced."""
    net.requires_grad_(True)
    with net.no_sync():
        net(batch(), "abcdef").sum().backward()
    branch(net, "a").requires_grad_(step == 0)
    net(batch(), "abcdef").sum().backward()


@case(
    model=lambda: partly_frozen(Branches()),
    adds=[0],
)
def unfrozen_and_frozen_again_inside_a_window(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        branch(net, "a").requires_grad_(True)
        net(batch(), "abcdef").sum().backward()
    branch(net, "a").requires_grad_(False)
    net(batch(), "abcdef").sum().backward()


@case(model=lambda: partly_frozen(Branches()), adds=[1])
def unfrozen_inside_a_window(net: Net, rank: int, step: int) -> None:
    branch(net, "a").requires_grad_(step > 1)
    with net.no_sync():
        net(batch(), "abcdef").sum().backward()
        branch(net, "a").requires_grad_(step > 0)
        net(batch(), "abcdef").sum().backward()
    net(batch(), "bcdef").sum().backward()


@case(adds=[1])
def parameter_replaced(net: Net, rank: int, step: int) -> None:
    if step == 1:
        branch(net, "a")[0].weight = nn.Parameter(torch.full((4, 4), 0.3, dtype=torch.float64))
    net(batch(), "abcdef").sum().backward()


@case(adds=[1, 2])
def layer_replaced_before_each_step(net: Net, rank: int, step: int) -> None:
    if step:
        branch(net, "f")[2] = constant(0.1 * step)
    net(batch(), "abcdef").sum().backward()


@case(adds=[0, 2])
def layers_added(net: Net, rank: int, step: int) -> None:
    """Before the first step too."""
    if step != 1:
        net.module.branches[f"added{step}"] = constant(0.2)
    net(batch(), [*net.module.branches]).sum().backward()


@case(adds=[1])
def layer_added_that_one_rank_uses(net: Net, rank: int, step: int) -> None:
    if step == 1:
        net.module.branches["added"] = constant(0.2)
    names = [*"abcdef"] + ["added"] * (step > 0 and rank == 1)
    net(batch(), names).sum().backward()


@case(adds=[1])
def adapters_added_and_the_rest_frozen(net: Net, rank: int, step: int) -> None:
    if step == 1:
        net.requires_grad_(False)
        for name in "abc":
            branch(net, name).append(constant(0.1))
    net(batch(), "abcdef").sum().backward()


def partly_frozen(net: Branches) -> Branches:
    net.branches["a"].requires_grad_(False)
    return net


def constant(value: float) -> nn.Linear:
    layer = nn.Linear(4, 4).double()
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, value)
    return layer


# 7. Batches of different size.


def samples(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64)


@case(weighted="mean")
def weighted_by_samples(net: Net, rank: int, step: int) -> None:
    n = [3, 1, 6][rank] + step
    with net.weighted(n):
        net(samples(n), "abcdef").pow(2).mean().backward()


@case(weighted="sum")
def weighted_sum_of_samples(net: Net, rank: int, step: int) -> None:
    n = [3, 1, 6][rank] + step
    with net.weighted(n, reduction="sum"):
        net(samples(n), "abcdef").pow(2).sum().backward()


@case(weighted="mean")
def weighted_and_unused_parameters(net: Net, rank: int, step: int) -> None:
    n = 1 + rank + step
    with net.weighted(n):
        net(samples(n), "abd" if rank else "bce").pow(2).mean().backward()


@case(weighted="mean")
def weighted_by_fractions(net: Net, rank: int, step: int) -> None:
    loss = net(samples(2), "abcdef").pow(2).mean()
    with net.weighted([0.25, 1.5, 0.001][rank]):
        loss.backward()


@case(weighted="mean")
def weight_of_zero_with_a_loss_of_nan(net: Net, rank: int, step: int) -> None:
    """What the mean over no samples gives."""
    n = 0 if rank == step % 2 else 3
    with net.weighted(n):
        net(samples(3) if n else samples(3) / 0, "abcdef").mean().backward()


@case(weighted="sum")
def weight_of_zero_with_a_sum_over_nothing(net: Net, rank: int, step: int) -> None:
    n = 0 if rank == step % 2 else 3
    with net.weighted(n, reduction="sum"):
        net(samples(n), "abcdef").pow(2).sum().backward()


@case(weighted="mean")
def all_weights_zero_in_the_first_step(net: Net, rank: int, step: int) -> None:
    n = step * (rank + 1)
    with net.weighted(n):
        (net(samples(3), "abcdef").pow(2).mean() * (1 if n else float("nan"))).backward()


def weighted_window(net: Net, rank: int, step: int, reduction: str) -> None:
    """Each rank has another number of microbatches, each microbatch another size."""
    count = 1 + (rank + step) % 3
    for number in range(count):
        n = (rank + 2 * number + step) % 4
        loss = net(samples(n or 1), "abcdef" if number else "abc").pow(2)
        loss = loss.sum() if reduction == "sum" else loss.mean()
        last = number == count - 1
        with contextlib.nullcontext() if last else net.no_sync(), net.weighted(n, reduction):
            (loss * 0 if reduction == "sum" and n == 0 else loss).backward()


@case(weighted="mean")
def weighted_windows_of_different_length(net: Net, rank: int, step: int) -> None:
    weighted_window(net, rank, step, "mean")


@case(weighted="sum")
def weighted_windows_of_sums_of_different_length(net: Net, rank: int, step: int) -> None:
    weighted_window(net, rank, step, "sum")


@case(weighted="mean")
def weighted_after_a_microbatch_without_weight(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(samples(2), "abc").pow(2).mean().backward()
    for number, n in enumerate((1 + rank, 4)):
        loss = net(samples(n), "abcdef").pow(2).mean()
        with contextlib.nullcontext() if number else net.no_sync(), net.weighted(n):
            loss.backward()


@case(weighted="sum", reductions=2)
def weighted_sums_twice(net: Net, rank: int, step: int) -> None:
    for n in (1 + rank, 4 - rank):
        with net.weighted(n, reduction="sum"):
            net(samples(n), "abcdef").pow(2).sum().backward()


@case(weighted="mean", reductions=2)
def weighted_twice(net: Net, rank: int, step: int) -> None:
    """The second mean is added to the first."""
    for n in (1 + rank, 4 - rank):
        with net.weighted(n):
            net(samples(n), "abcdef").pow(2).mean().backward()


# 8. Buffers while a graph is alive.


@case(model=Normalised)
def batch_norm_two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    (net(batch()).pow(2).sum() + net(batch()).pow(3).sum()).backward()


@case(model=Normalised, reductions=2)
def batch_norm_two_forwards_then_two_backwards(net: Net, rank: int, step: int) -> None:
    losses = [net(batch()).pow(2).sum(), net(batch()).pow(3).sum()]
    for loss in losses:
        loss.backward()


@case(model=NormalisedAsInEval)
def batch_norm_in_eval_two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    assert not net.module.layers[1].training
    (net(batch()).pow(2).sum() + net(batch()).pow(3).sum()).backward()


@case(model=NormalisedAsInEval, reductions=2)
def batch_norm_in_eval_two_forwards_then_two_backwards(net: Net, rank: int, step: int) -> None:
    losses = [net(batch()).pow(2).sum(), net(batch()).pow(3).sum()]
    for loss in losses:
        loss.backward()


@case(model=Multiplied)
def buffer_as_a_factor_two_forwards_then_one_backward(net: Net, rank: int, step: int) -> None:
    (net(batch()).pow(2).sum() + net(batch()).pow(3).sum()).backward()


# 9. Gradients on request.


@case()
def gradient_of_the_input(net: Net, rank: int, step: int) -> None:
    x = batch()
    loss = net(x, "abc").pow(2).sum()
    assert torch.autograd.grad(loss, x, retain_graph=True)[0].shape == x.shape
    loss.backward()


@case()
def gradient_of_parameters(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "abc").pow(2).sum()
    weights = list(branch(net, "b").parameters())
    torch.autograd.grad(loss, weights, retain_graph=True)
    torch.autograd.grad(net(batch(), "abc").sum(), list(net.parameters()), allow_unused=True)
    loss.backward()


@case()
def gradient_of_another_output(net: Net, rank: int, step: int) -> None:
    first, second = net(batch(), "abc").pow(2), net(batch(), "de")
    torch.autograd.grad(second.sum(), first, retain_graph=True, allow_unused=True)
    (first.sum() + second.sum()).backward()


@case()
def gradient_between_no_sync_and_backward(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(batch(), "ac").sum().backward()
        x = batch()
        torch.autograd.grad(net(x, "bd").sum(), x)
    x = batch()
    torch.autograd.grad(net(x, "ef").sum(), x)
    net(batch(), "b").sum().backward()


@case()
def gradient_penalty(net: Net, rank: int, step: int) -> None:
    x = batch()
    output = net(x, "abc")
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.mean() + (gradient.norm() - 1).pow(2)).backward()


@case()
def gradient_penalty_alone(net: Net, rank: int, step: int) -> None:
    x = batch()
    (gradient,) = torch.autograd.grad(net(x, "abc").sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


@case()
def backward_that_builds_a_graph(net: Net, rank: int, step: int) -> None:
    with warnings.catch_warnings():  # of a reference cycle, which the test runner collects
        warnings.simplefilter("ignore")
        net(batch(), "abc").pow(2).sum().backward(create_graph=True)


@case(reductions=0)
def autograd_grad_alone(net: Net, rank: int, step: int) -> None:
    x = batch()
    torch.autograd.grad(net(x, "abc").sum(), x)
    torch.autograd.grad(net(batch(False), "abc").sum(), list(branch(net, "a").parameters()))
    if isinstance(net, DistributedDataParallel):
        assert all(param.grad is None for param in net.parameters())


def add_to_grads(params: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            param.grad = gradient if param.grad is None else param.grad + gradient


@case(reductions=0, requests=1)
def gradients_of_autograd_grad(net: Net, rank: int, step: int) -> None:
    params = list(net.parameters())
    loss = net(batch(), "abc" if rank else "bcd").pow(2).sum()
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    add_to_grads(params, net.reduce_gradients(gradients))


@case(reductions=0, requests=1, names_params=True)
def gradients_of_second_order(net: Net, rank: int, step: int) -> None:
    """Of a penalty on the gradients for some parameters."""
    params = list(branch(net, "b").parameters())
    loss = net(batch(), "abc").pow(2).sum()
    first = torch.autograd.grad(loss, params, create_graph=True)
    second = torch.autograd.grad(loss + sum(grad.square().sum() for grad in first), params)
    add_to_grads(params, net.reduce_gradients(second, params))


@case(reductions=0, requests=1)
def gradients_by_name(net: Net, rank: int, step: int) -> None:
    names = ["branches.a.0.weight", "branches.c.2.bias"][: 1 + rank]
    params = dict(net.module.named_parameters())
    made = {name: torch.full_like(params[name], 1.0 + rank + step) for name in names}
    means = net.reduce_gradients(made)
    add_to_grads(params.values(), means.values())


@case(reductions=0, requests=1)
def gradients_made_by_hand(net: Net, rank: int, step: int) -> None:
    """As evolution strategies do: ``.grad`` is filled, then reduced in place."""
    for number, param in enumerate(net.parameters()):
        if number % 3 != rank:
            noise = torch.randn_like(param)
            param.grad = noise if param.grad is None else param.grad + noise
    net.reduce_gradients()


@case(reductions=0, requests=1)
def backwards_under_no_sync_reduced_by_hand(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        for names in ("abc", "cd" if rank else "ce"):
            net(batch(), names).sum().backward()
        net.reduce_gradients()


@case(requests=1, names_params=True)
def gradients_on_request_between_forward_and_backward(net: Net, rank: int, step: int) -> None:
    params = list(branch(net, "b").parameters())
    loss = net(batch(), "abcdef").pow(2).sum()
    gradients = torch.autograd.grad(loss, params, retain_graph=True)
    means = net.reduce_gradients(gradients, params)
    loss.backward()
    add_to_grads(params, means)


@case(requests=1, names_params=True)
def gradients_on_request_inside_a_window(net: Net, rank: int, step: int) -> None:
    """They leave what is accumulated as it is."""
    with net.no_sync():
        net(batch(), "abcdef").sum().backward()
    params = list(branch(net, "b").parameters())
    gradients = torch.autograd.grad(net(batch(), "abc").pow(2).sum(), params)
    means = net.reduce_gradients(gradients, params)
    net(batch(), "abcdef").sum().backward()
    add_to_grads(params, means)


@case(reductions=0, requests=1, names_params=True, weighted="mean")
def weighted_gradients_on_request(net: Net, rank: int, step: int) -> None:
    params = list(net.parameters())
    n = 1 + rank + step
    loss = net(samples(n), "abcdef").pow(2).mean()
    with net.weighted(n):
        gradients = net.reduce_gradients(torch.autograd.grad(loss, params), params)
        add_to_grads(params, gradients)


# 10. Ranks that disagree.


@case()
def loss_reaches_nothing_on_one_rank(net: Net, rank: int, step: int) -> None:
    net(batch(), "" if rank == step % 2 else "abc").sum().backward()


@case()
def loss_reaches_nothing_on_any_rank(net: Net, rank: int, step: int) -> None:
    net(batch(), "").sum().backward()


@case(reductions=2)
def different_control_flow(net: Net, rank: int, step: int) -> None:
    """One rank sums two losses of one forward each; another runs one forward twice."""
    if rank == 0:
        losses = [net(batch(), "abc").sum(), net(batch(), "d").pow(2).sum()]
    elif rank == 1:
        output = net(batch(), "bca")
        losses = [output.pow(2).sum(), net(output.detach(), "b").sum()]
    else:
        losses = [net(net(batch(), "e"), "a").sum(), net(batch(), "").sum()]
    for loss in losses if step % 2 else reversed(losses):
        loss.backward()
