"""Parameters that are frozen, unfrozen, replaced or added after the module was wrapped."""

import contextlib
import copy
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from distributed import assert_same_on_all_ranks, gather, in_rings, ranks, recorded_collectives
from modules import Layers
from oracle import assert_mean, one_per_rank
from torch import nn
from torch.nn import Parameter
from training import breaking_off, drawn, train_step, wrap

from tritonddp import DistributedDataParallel
from tritonddp.reducer.reducer import Reducer


def net() -> Layers:
    """Layers one behind the other; what has been added comes last."""
    layers = Layers("abc")
    layers.layers["b"].requires_grad_(False)
    return layers.double()


def unfreeze(net: Layers) -> None:
    net.layers["b"].requires_grad_(True)


def freeze(net: Layers) -> None:
    net.layers["c"].requires_grad_(False)


def freeze_one_and_unfreeze_another(net: Layers) -> None:
    unfreeze(net)
    freeze(net)


def replace(net: Layers) -> None:
    net.layers["a"].weight = Parameter(torch.full((4, 4), 0.3, dtype=torch.float64))


def replace_a_layer(net: Layers) -> None:
    torch.manual_seed(3)
    net.layers["a"] = nn.Linear(4, 4).double()


def add_a_layer(net: Layers) -> None:
    torch.manual_seed(4)
    net.layers["d"] = nn.Linear(4, 4).double()


def remove_a_layer(net: Layers) -> None:
    del net.layers["c"]


def add_of_another_dtype(net: Layers) -> None:
    net.layers["d"] = Wide()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.ones(4, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.double()


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


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    return drawn(3, 4, step=step, rank=rank, dtype=torch.float64)


def check_step(ddp: DistributedDataParallel, step: int) -> None:
    """One, against the oracle."""
    alone = one_per_rank(ddp.module)
    for rank, each in enumerate(alone):
        each.zero_grad()
        each(batch(step, rank)).sum().backward()
    ddp.zero_grad()
    ddp(batch(step)).sum().backward()
    assert_mean(ddp, alone, f"step {step}")


@pytest.mark.parametrize("finds_unused", [False, True])
@ranks(2, views=True)
def test_a_layer_that_is_called_beside_the_module_is_reduced_until_no_rank_uses_it(
    rank: int, finds_unused: bool, view: bool
) -> None:
    ddp = wrap(net(), view, bucket_cap_mb=1e-4, find_unused_parameters=finds_unused)
    if not finds_unused:  # else before the order of the buckets is known
        check_step(ddp, 0)
    head = ddp.module.layers.pop("c")
    for step in range(1, 4):
        ddp.zero_grad()
        head.zero_grad()
        outputs = ddp(batch(step))
        (head(outputs) if step < 3 or rank else outputs).sum().backward()
        assert_same_on_all_ranks([param.grad for param in head.parameters()])
    assert head.weight.grad.any()
    check_step(ddp, 4)
    assert "layers.c.weight" not in {name for each in ddp.reducer.buckets for name in each.names}
    head.float()
    unfreeze(ddp.module)
    check_step(ddp, 5)
    ddp.module.layers.pop("a").float()  # with its gradients
    check_step(ddp, 6)


@ranks(2, views=True)
def test_a_table_that_is_replaced_keeps_its_sparse_gradient(view: bool) -> None:
    table, head = nn.EmbeddingBag(5, 4, mode="sum", sparse=True), nn.Linear(4, 2)
    ddp = wrap(nn.Sequential(table, head), view)
    ddp(torch.tensor([[1, 2]])).sum().backward()
    former = table.weight.grad
    ddp.module[0] = nn.EmbeddingBag(5, 4, mode="sum")
    ddp.zero_grad()  # it does not know the former table any more
    ddp(torch.tensor([[3]])).sum().backward()
    assert table.weight.grad is former
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@ranks(2)
def test_the_ranks_agree_once_on_a_layer_that_is_called_beside() -> None:
    ddp = wrap(net())
    for step in range(4):  # the layer in the middle is frozen in turns, and stays in its bucket
        ddp.module.layers["b"].requires_grad_(step % 2 == 1)
        check_step(ddp, step)
    head = ddp.module.layers.pop("c")
    adopt = Reducer.adopt_parameters
    with mock.patch.object(Reducer, "adopt_parameters", autospec=True, side_effect=adopt) as calls:
        for step in range(4):
            ddp.module.layers["b"].requires_grad_(step % 2 == 1)
            head(ddp(batch(step))).sum().backward()
    calls.assert_called_once()


@CHANGE
@ranks(2, 3, views=True)
def test_a_change_on_some_ranks_only_is_an_error_on_every_rank_that_names_the_parameters(
    rank: int, change: Callable[[Layers], None], view: bool
) -> None:
    ddp = wrap(net(), view, bucket_cap_mb=1e-4)
    check_step(ddp, 0)
    before = {name: p.requires_grad for name, p in ddp.module.named_parameters()}
    old = dict(ddp.module.named_parameters())
    kept = copy.copy(ddp.module.layers._modules), copy.copy(ddp.module.layers["a"]._parameters)
    if rank == 1:
        change(ddp.module)
    differing = {
        name
        for name, param in ddp.module.named_parameters()
        if before.get(name) != param.requires_grad or old[name] is not param
    } | (set(before) - set(dict(ddp.module.named_parameters())))
    (differing,) = [names for names in gather(differing) if names] or [set()]
    with pytest.raises(RuntimeError) as raised:
        ddp(batch(1)).sum().backward()
    for text in gather(str(raised.value)):
        assert all(repr(name) in text for name in differing), text
    # The change taken back, everything is as before.
    ddp.module.layers._modules.clear()
    ddp.module.layers._modules.update(kept[0])
    ddp.module.layers["a"]._parameters.update(kept[1])
    for name, param in old.items():
        param.requires_grad_(before[name])
    check_step(ddp, 2)


@ranks(2, views=True)
def test_freezing_in_turns_costs_collectives_and_new_buckets_in_the_first_turns_only(
    view: bool,
) -> None:
    ddp = in_rings(net(), bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    ddp.module.requires_grad_(True)
    check_step(ddp, 0)

    buckets = None
    for step in range(1, 8):
        ddp.module.layers["a"].requires_grad_(step % 2 == 0)
        ddp.module.layers["c"].requires_grad_(step % 2 == 1)
        with recorded_collectives() as calls:
            train_step(ddp, batch(step), loss=torch.sum)
        if step > 3:
            assert calls.names == ["all_reduce"] * len(ddp.reducer.buckets)
            buckets = buckets or list(ddp.reducer.buckets)
    check_step(ddp, 8)
    assert ddp.reducer.buckets == buckets


def with_buffer(module: nn.Module) -> nn.Module:
    """As in stock, a module without buffers at wrapping never has any broadcast."""
    module.register_buffer("held", torch.zeros(1, dtype=torch.double))
    return module


@pytest.mark.parametrize("local", [False, True], ids=["", "no_sync"])
@ranks(2, views=True)
def test_what_is_added_has_the_values_of_rank_0_in_its_first_forward(
    rank: int, local: bool, view: bool
) -> None:
    ddp = wrap(with_buffer(net()), view)
    check_step(ddp, 0)
    ddp.module.layers["n"] = nn.BatchNorm1d(4, momentum=1.0).double()
    ddp.module.layers["d"] = Wide()
    nn.init.constant_(ddp.module.layers["d"].scale, 2.0 + rank)
    ddp.module.layers["n"].running_mean.fill_(rank)
    ddp.eval()
    with ddp.no_sync() if local else contextlib.nullcontext():
        output = ddp(batch(1, 0))  # of the same inputs
    assert_same_on_all_ranks([output.detach(), *ddp.parameters(), *ddp.buffers()])
    assert ddp.module.layers["d"].scale.tolist() == [2.0] * 4


@ranks(2)
def test_buffers_that_one_rank_alone_has_added_are_not_broadcast(rank: int) -> None:
    """Messages of different size would end one of the processes."""
    ddp = DistributedDataParallel(with_buffer(net()))
    check_step(ddp, 0)
    norm = nn.BatchNorm1d(4).double()
    if rank:
        ddp.module.layers["d"] = norm
    with pytest.raises(RuntimeError, match=r"'layers\.d\.weight'"):
        ddp(batch(1)).sum().backward()
    ddp.module.layers["d"] = norm  # now on every rank
    check_step(ddp, 2)
    norm.eval().running_mean.fill_(rank)  # or the forward would change it after the broadcast
    ddp(batch(3))
    assert_same_on_all_ranks(list(norm.buffers()))


@ranks(2, views=True)
def test_a_backward_that_breaks_while_parameters_are_taken_up(rank: int, view: bool) -> None:
    ddp = wrap(net(), view, bucket_cap_mb=1e-4)
    check_step(ddp, 0)
    add_a_layer(ddp.module)
    ddp.zero_grad()
    x = batch(1).requires_grad_()
    loss = ddp(x).sum()
    with breaking_off(ddp.module.layers["a"].weight, rank == 1):
        loss.backward()
    if rank == 0:
        assert ddp.module.layers["d"].weight.grad.isnan().all()
    check_step(ddp, 2)


@ranks(2, views=True)
def test_a_head_that_is_added_to_a_frozen_model_and_called_beside_it(rank: int, view: bool) -> None:
    """Linear probing: no output of the wrapped module has a graph."""
    ddp = wrap(net(), view)
    check_step(ddp, 0)
    ddp.requires_grad_(False)
    ddp.module.head = head = nn.Linear(4, 1).double()
    ddp.module.forward = lambda x: x
    for step in range(4):
        ddp.zero_grad()
        (head(ddp(batch(step))).sum() * (1 + rank)).backward()
        assert head.bias.grad.tolist() == [4.5]
        assert_same_on_all_ranks([head.weight.grad])


@ranks(2, views=True)
def test_leaves_that_stand_in_are_neither_reduced_nor_overwritten(rank: int, view: bool) -> None:
    """Weights that each rank has adapted by itself, as first-order MAML does."""
    ddp = wrap(net(), view)
    x = torch.full((1, 4), rank + 1, dtype=torch.float64)
    for step in range(3):
        own, alone = (
            {name: (p.detach() * (rank + 1)).requires_grad_() for name, p in ddp.named_parameters()}
            for _ in range(2)
        )
        torch.func.functional_call(ddp, own, (x,)).sum().backward()
        torch.func.functional_call(
            ddp.module, {name.removeprefix("module."): each for name, each in alone.items()}, (x,)
        ).sum().backward()
        for name, tensor in own.items():
            assert torch.equal(tensor, alone[name])
            assert torch.equal(tensor.grad, alone[name].grad)
        check_step(ddp, step)


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
