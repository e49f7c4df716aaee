"""Parameters that are frozen, unfrozen, replaced or added after the module was wrapped."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, in_rings, ranks, recorded_collectives
from torch import nn
from torch.nn import Parameter

from tritonddp import DistributedDataParallel
from tritonddp.buckets.manager import REBUILD_AFTER
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.coordination.group import Group

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Net(nn.Module):
    """Layers one behind the other; what has been added comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        self.layers["b"].requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def unfreeze(net: Net) -> None:
    net.layers["b"].requires_grad_(True)


def freeze(net: Net) -> None:
    net.layers["c"].requires_grad_(False)


def freeze_one_and_unfreeze_another(net: Net) -> None:
    unfreeze(net)
    freeze(net)


def replace(net: Net) -> None:
    net.layers["a"].weight = Parameter(torch.full((4, 4), 0.3, dtype=torch.float64))


def replace_a_layer(net: Net) -> None:
    torch.manual_seed(3)
    net.layers["a"] = nn.Linear(4, 4).double()


def add_a_layer(net: Net) -> None:
    torch.manual_seed(4)
    net.layers["d"] = nn.Linear(4, 4).double()


def remove_a_layer(net: Net) -> None:
    del net.layers["c"]


def add_of_another_dtype(net: Net) -> None:
    net.layers["d"] = Wide()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.ones(4, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.double()


def freeze_all(net: Net) -> None:
    net.requires_grad_(False)


CHANGES = [
    unfreeze,
    freeze,
    freeze_one_and_unfreeze_another,
    replace,
    replace_a_layer,
    add_a_layer,
    remove_a_layer,
    add_of_another_dtype,
]
CHANGE = pytest.mark.parametrize("change", CHANGES)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def check_step(ddp: DistributedDataParallel, step: int, local: bool = False) -> None:
    """One step, with a microbatch under ``no_sync`` first if ``local``, against the oracle."""
    sums: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        alone = copy.deepcopy(ddp.module)
        alone.zero_grad()
        for part in [0, 500] if local else [0]:
            alone(batch(rank, step + part)).sum().backward()
        for name, param in alone.named_parameters():
            if param.grad is not None:
                sums[name] = sums.get(name, 0) + param.grad / dist.get_world_size()
    ddp.zero_grad()
    if local:
        with ddp.no_sync():
            ddp(batch(dist.get_rank(), step + 500)).sum().backward()
    ddp(batch(dist.get_rank(), step)).sum().backward()
    for name, param in ddp.module.named_parameters():
        assert (param.grad is None) == (name not in sums), f"step {step}: {name}"
        if name in sums:
            torch.testing.assert_close(
                param.grad, sums[name], msg=lambda m, n=name: f"step {step}: {n}: {m}"
            )
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()], f"step {step}")


@VIEW
@CHANGE
@pytest.mark.parametrize("first", [0, 2], ids=["before the first step", "later"])
@pytest.mark.parametrize("local", [False, True], ids=["", "no_sync"])
@ranks(2, 3)
def test_changes_are_taken_up_at_the_next_forward(
    change: Callable[[Net], None], first: int, local: bool, view: bool
) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    for step in range(first + REBUILD_AFTER + 3):
        if step == first:
            change(ddp.module)
        check_step(ddp, step, local)
    placed = {name for bucket in ddp.reducer.buckets for name in bucket.names}
    assert placed == {name for name, p in ddp.module.named_parameters() if p.requires_grad}


@VIEW
@CHANGE
@ranks(2, 3)
def test_a_change_on_some_ranks_only_is_an_error_on_every_rank_that_names_the_parameters(
    change: Callable[[Net], None], view: bool
) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    check_step(ddp, 0)
    before = {name: p.requires_grad for name, p in ddp.module.named_parameters()}
    old = dict(ddp.module.named_parameters())
    kept = copy.copy(ddp.module.layers._modules), copy.copy(ddp.module.layers["a"]._parameters)
    if dist.get_rank() == 1:
        change(ddp.module)
    differing = {
        name
        for name, param in ddp.module.named_parameters()
        if before.get(name) != param.requires_grad or old[name] is not param
    } | (set(before) - set(dict(ddp.module.named_parameters())))
    (differing,) = [names for names in gather(differing) if names] or [set()]
    with pytest.raises(RuntimeError) as raised:
        ddp(batch(dist.get_rank(), 1)).sum().backward()
    for text in gather(str(raised.value)):
        assert all(repr(name) in text for name in differing), text
    # The change taken back, everything is as before.
    ddp.module.layers._modules.clear()
    ddp.module.layers._modules.update(kept[0])
    ddp.module.layers["a"]._parameters.update(kept[1])
    for name, param in old.items():
        param.requires_grad_(before[name])
    check_step(ddp, 2)


@VIEW
@ranks(2)
def test_a_pattern_of_freezing_in_turns_costs_no_collective_and_no_new_bucket(view: bool) -> None:
    ddp = in_rings(Net(), bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    ddp.module.requires_grad_(True)
    check_step(ddp, 0)
    buckets = list(ddp.reducer.buckets)
    with recorded_collectives() as calls:
        for step in range(1, 9):
            ddp.module.layers["a"].requires_grad_(step % 2 == 0)
            ddp.module.layers["c"].requires_grad_(step % 2 == 1)
            ddp.zero_grad()
            ddp(batch(dist.get_rank(), step)).sum().backward()
    assert calls.names == ["all_reduce"] * 8 * len(buckets)
    assert ddp.reducer.buckets == buckets


@VIEW
@ranks(2)
def test_a_module_frozen_as_a_whole_is_still_passed_through(view: bool) -> None:
    """As the discriminator of a GAN in the generator's turn."""
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    check_step(ddp, 0)
    ddp.zero_grad()
    ddp.requires_grad_(False)
    for step in range(REBUILD_AFTER + 2):
        x = batch(dist.get_rank(), step).requires_grad_()
        ddp(x).sum().backward()
        assert x.grad is not None
    assert all(param.grad is None for param in ddp.parameters())
    ddp.requires_grad_(True)
    check_step(ddp, 1)
    check_step(ddp, 2)


@VIEW
@ranks(2)
def test_what_is_added_starts_from_the_values_of_rank_0(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    check_step(ddp, 0)
    added = Wide()
    nn.init.constant_(added.scale, 2.0 + dist.get_rank())
    ddp.module.layers["d"] = added
    ddp(batch(dist.get_rank(), 1)).sum().backward()
    assert added.scale.tolist() == [2.0] * 4


@ranks(2)
def test_buffers_that_one_rank_alone_has_added_are_not_broadcast() -> None:
    """Messages of different size would end one of the processes."""
    ddp = DistributedDataParallel(Net())
    check_step(ddp, 0)
    norm = nn.BatchNorm1d(4).double()
    if dist.get_rank():
        ddp.module.layers["d"] = norm
    with pytest.raises(RuntimeError, match=r"'layers\.d\.weight'"):
        ddp(batch(dist.get_rank(), 1)).sum().backward()
    ddp.module.layers["d"] = norm  # now on every rank
    check_step(ddp, 2)
    ddp.eval()  # or the forward would change them after the broadcast
    with recorded_collectives() as calls:
        ddp(batch(dist.get_rank(), 3))
    assert calls.names == ["broadcast"]
    assert_same_on_all_ranks(list(norm.buffers()))


@VIEW
@ranks(2)
def test_a_graph_that_is_kept_outlives_the_broadcast_of_what_was_unfrozen(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    check_step(ddp, 0)
    unfreeze(ddp.module)
    ddp.zero_grad()
    loss = ddp(batch(dist.get_rank(), 1)).sum()
    loss.backward(retain_graph=True)
    once = [param.grad.clone() for param in ddp.parameters()]
    loss.backward()
    for param, grad in zip(ddp.parameters(), once, strict=True):
        torch.testing.assert_close(param.grad, 2 * grad)


@VIEW
@ranks(2)
def test_a_stale_gradient_of_an_unfrozen_parameter_that_nobody_uses_stays(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    check_step(ddp, 0)
    spare = nn.Linear(2, 2).double()
    ddp.module.spare = spare
    spare.weight.grad = torch.full((2, 2), float(dist.get_rank()), dtype=torch.float64)
    ddp.zero_grad = lambda: None  # type: ignore[method-assign]
    ddp(batch(dist.get_rank(), 1)).sum().backward()
    assert spare.weight.grad.tolist() == [[float(dist.get_rank())] * 2] * 2
    assert spare.bias.grad is None


@VIEW
@ranks(2)
def test_frozen_between_forward_and_backward(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    loss = ddp(batch(dist.get_rank(), 0)).sum()
    ddp.module.layers["c"].requires_grad_(False)
    loss.backward()
    check_step(ddp, 1)
    ddp.module.layers["c"].requires_grad_(True)
    check_step(ddp, 2)


@VIEW
@ranks(2)
def test_a_backward_that_breaks_while_parameters_are_taken_up(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    check_step(ddp, 0)
    add_a_layer(ddp.module)
    ddp.zero_grad()
    x = batch(dist.get_rank(), 1).requires_grad_()
    loss = ddp(x).sum()
    if dist.get_rank():
        ddp.module.layers["a"].weight.register_hook(_break)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        ddp.module.layers["a"].weight._backward_hooks.clear()
    else:
        loss.backward()
        assert ddp.module.layers["d"].weight.grad.isnan().all()
    check_step(ddp, 2)


def _break(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@VIEW
@ranks(2)
def test_an_added_parameter_that_one_rank_cannot_reduce_is_named_and_the_others_go_on(
    view: bool,
) -> None:
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    check_step(ddp, 0)
    ddp.module.table = nn.Embedding(3, 4).double()
    ddp(batch(dist.get_rank(), 1))
    ddp.module.table.sparse = dist.get_rank() == 0
    loss = ddp(batch(dist.get_rank(), 1)).sum() + ddp.module.table(torch.tensor([1])).sum()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank 0, step 2: .*'table\.weight'.*sparse"):
            loss.backward()
    else:
        loss.backward()
    check_step(ddp, 2)


@VIEW
@ranks(2)
def test_a_head_that_is_added_to_a_frozen_model_and_called_beside_it(view: bool) -> None:
    """Linear probing: no output of the wrapped module has a graph."""
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    check_step(ddp, 0)
    ddp.requires_grad_(False)
    ddp.module.head = head = nn.Linear(4, 1).double()
    ddp.module.forward = lambda x: x
    for step in range(REBUILD_AFTER + 2):
        ddp.zero_grad()
        (head(ddp(batch(dist.get_rank(), step))).sum() * (1 + dist.get_rank())).backward()
        assert head.bias.grad.tolist() == [4.5]
        assert_same_on_all_ranks([head.weight.grad])


@VIEW
@ranks(2)
def test_a_forward_of_one_rank_alone_with_everything_frozen_for_once(view: bool) -> None:
    """For a saliency map, say. When buckets are made anew depends on reductions only."""
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    check_step(ddp, 0)
    freeze(ddp.module)
    for step in range(1, REBUILD_AFTER + 4):
        check_step(ddp, step)
        if dist.get_rank() == 0 and step == 3:
            trainable = [param for param in ddp.parameters() if param.requires_grad]
            ddp.requires_grad_(False)
            ddp.forward_sync_buffers = False
            ddp(batch(0, 0).requires_grad_())
            for param in trainable:
                param.requires_grad_(True)


@ranks(1)
def test_a_dtype_that_cannot_be_reduced_is_named() -> None:
    ddp = DistributedDataParallel(Net())
    ddp.module.phase = Parameter(torch.zeros(2, dtype=torch.complex32))
    with pytest.raises(NotImplementedError, match=r"'phase'.*complex32"):
        ddp(batch(0, 0))


@ranks(1)
def test_parameters_see_each_kind_of_change() -> None:
    wrapper = nn.Module()
    wrapper.module = Net()
    for change in CHANGES:
        parameters = ModuleParameters(wrapper, (), Group(dist.group.WORLD))
        parameters.set_bucketed(*zip(*wrapper.module.named_parameters(), strict=True))
        assert not parameters.has_changed()
        before = parameters.schema
        change(wrapper.module)
        assert parameters.has_changed(), change.__name__
        parameters.update()
        assert not parameters.has_changed()
        assert parameters.schema != before, change.__name__
        wrapper.module = Net()
        assert parameters.has_changed()


@VIEW
@ranks(2)
def test_tensors_that_stand_in_for_some_parameters_change_nothing(view: bool) -> None:
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    ddp.module.layers["b"].requires_grad_(True)
    x = torch.full((1, 4), dist.get_rank() + 1, dtype=torch.float64)
    for _ in range(REBUILD_AFTER + 2):
        ddp.zero_grad()
        fast = {name: 2 * param for name, param in ddp.named_parameters() if "a." in name}
        torch.func.functional_call(ddp, fast, (x,)).sum().backward()
        means = [param.grad for param in ddp.parameters()]
        assert_same_on_all_ranks(means)
    alone = copy.deepcopy(ddp.module)
    alone.zero_grad()
    fast = {name: 2 * param for name, param in alone.named_parameters() if "a." in name}
    torch.func.functional_call(alone, fast, (x,)).sum().backward()
    for mean, param in zip(means, alone.parameters(), strict=True):
        torch.testing.assert_close(mean, sum(gather(param.grad)) / 2)


@VIEW
@ranks(2)
def test_buffers_that_go_in_a_step_that_breaks_off_go_on_all_ranks(view: bool) -> None:
    net = Net()
    net.layers["n"] = nn.BatchNorm1d(4).double()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=view)
    x = torch.randn(3, 4, dtype=torch.float64)
    ddp(x).sum().backward()
    del net.layers["n"]
    loss = ddp(x + dist.get_rank()).sum()
    if dist.get_rank() == 0:
        handle = net.layers["a"].bias.register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    else:
        loss.backward()
    for _ in range(2):  # a broadcast on one rank alone would hang
        ddp.zero_grad()
        ddp(x + dist.get_rank()).sum().backward()
        assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@ranks(1)
def test_buffers_that_hold_a_graph_are_not_held() -> None:
    """As ``torch.func.functional_call`` puts them in the place of others, for one forward."""
    module = nn.BatchNorm1d(3)
    parameters = DistributedDataParallel(module)._ddp_state.core.parameters
    for _ in range(2):
        module.running_mean = torch.ones(3, requires_grad=True) * 2
        assert parameters.buffers()[0][1] is module.running_mean
        held = weakref.ref(module.running_mean)
        module.running_mean = torch.ones(3)
        assert held() is None
        assert parameters.buffers()[0][1] is module.running_mean
