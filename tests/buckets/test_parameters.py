"""Parameters that are frozen, unfrozen, replaced or added after the module was wrapped."""

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from distributed import assert_same_on_all_ranks, gather, in_rings, ranks, recorded_collectives
from modules import Layers
from oracle import assert_mean, one_per_rank
from torch import nn
from torch.nn import Parameter
from training import drawn, train_step, wrap

from tritonddp import DistributedDataParallel


def net() -> Layers:
    """Layers in a row, one of which is frozen."""
    layers = Layers("abc")
    layers.layers["b"].requires_grad_(False)
    return layers.double()


class Scale(nn.Module):
    """A parameter of another dtype than the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.ones(4, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.double()


CHANGES: dict[str, Callable[[Layers], object]] = {
    "unfreeze": lambda net: net.layers["b"].requires_grad_(True),
    "freeze": lambda net: net.layers["c"].requires_grad_(False),
    "replace": lambda net: setattr(
        net.layers["a"], "weight", Parameter(torch.full((4, 4), 0.3, dtype=torch.float64))
    ),
    "add a layer": lambda net: net.layers.update({"d": nn.Linear(4, 4).double()}),
    "remove a layer": lambda net: net.layers.pop("c"),
    "add another dtype": lambda net: net.layers.update({"d": Scale()}),
}


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    return drawn(3, 4, step=step, rank=rank, dtype=torch.float64)


def check_step(ddp: DistributedDataParallel, step: int) -> None:
    """One step, compared with the oracle."""
    alone = one_per_rank(ddp.module)
    for rank, each in enumerate(alone):
        each.zero_grad()
        each(batch(step, rank)).sum().backward()
    ddp.zero_grad()
    ddp(batch(step)).sum().backward()
    assert_mean(ddp, alone, f"step {step}")


@pytest.mark.parametrize("change", CHANGES)
@ranks(2, 3)
def test_a_change_on_some_ranks_only_is_an_error_on_every_rank_that_names_the_parameters(
    rank: int, change: str
) -> None:
    ddp = wrap(net(), bucket_cap_mb=1e-4)
    check_step(ddp, 0)
    modules, weights = ddp.module.layers._modules, ddp.module.layers["a"]._parameters
    kept = copy.copy(modules), copy.copy(weights)
    before = dict(ddp.module.named_parameters())
    required = {name: param.requires_grad for name, param in before.items()}
    if rank == 1:
        CHANGES[change](ddp.module)
    now = dict(ddp.module.named_parameters())
    differing = {name for name, param in now.items() if before.get(name) is not param}
    differing |= {name for name, param in before.items() if param.requires_grad != required[name]}
    differing = gather(differing | (before.keys() - now.keys()))[1]
    assert differing
    with pytest.raises(RuntimeError) as raised:
        ddp(batch(1)).sum().backward()
    for text in gather(str(raised.value)):
        assert all(repr(name) in text for name in differing), text
    # The change is undone.
    modules.clear()
    modules.update(kept[0])
    weights.update(kept[1])
    for name, param in before.items():
        param.requires_grad_(required[name])
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


@ranks(2, views=True)
def test_added_layers_have_the_values_of_rank_0_in_their_first_forward(
    rank: int, view: bool
) -> None:
    module = net()
    module.register_buffer("held", torch.zeros(1))  # without buffers at wrapping none is broadcast
    ddp = wrap(module, view)
    check_step(ddp, 0)
    ddp.module.layers["n"] = nn.BatchNorm1d(4, momentum=1.0).double()
    ddp.module.layers["d"] = Scale()
    nn.init.constant_(ddp.module.layers["d"].scale, 2.0 + rank)
    ddp.module.layers["n"].running_mean.fill_(rank)
    ddp.eval()
    with ddp.no_sync():
        output = ddp(batch(1, 0))  # of the same inputs
    assert_same_on_all_ranks([output.detach(), *ddp.parameters(), *ddp.buffers()])
    assert ddp.module.layers["d"].scale.tolist() == [2.0] * 4


@ranks(2, views=True)
def test_a_head_that_is_added_to_a_frozen_model_is_reduced(rank: int, view: bool) -> None:
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


@ranks(1)
def test_the_wrapper_does_not_keep_a_buffer_with_a_graph_alive() -> None:
    """``torch.func.functional_call`` replaces buffers by such tensors for one forward."""
    module = nn.BatchNorm1d(3)
    parameters = DistributedDataParallel(module)._ddp_state.core.parameters
    for _ in range(2):
        module.running_mean = torch.ones(3, requires_grad=True) * 2
        assert parameters.buffers()[0][1] is module.running_mean
        held = weakref.ref(module.running_mean)
        module.running_mean = torch.ones(3)
        assert held() is None
        assert parameters.buffers()[0][1] is module.running_mean
