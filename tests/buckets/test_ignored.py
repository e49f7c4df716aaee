"""Parameters and buffers that are ignored at wrapping stay rank-local under any later name."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune
from training import (
    drawn,
    train_step,
)

from tritonddp import DistributedDataParallel
from tritonddp.buckets.ignored import Ignored
from tritonddp.buckets.parameters import ModuleParameters

WIDTH = 4


class Net(nn.Module):
    """A shared layer, and a rank-local expert."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(100 + dist.get_rank())
        self.expert = nn.Sequential(nn.Linear(WIDTH, WIDTH, **options), nn.BatchNorm1d(WIDTH))
        names = [f"expert.{name}" for name, _ in self.expert.named_parameters()]
        names += [f"expert.{name}" for name, _ in self.expert.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = names

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.shared(x))


class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def put_in_a_sequential(net: Net) -> None:
    net.expert = nn.Sequential(net.expert, nn.Tanh())


def grow(net: Net) -> None:
    net.expert.append(nn.Linear(WIDTH, WIDTH))


CHANGES: dict[str, Callable[[Net], Any]] = {
    "sequential": put_in_a_sequential,
    "prune": lambda net: prune.random_unstructured(net.expert[0], "weight", 0.5),
    "weight_norm": lambda net: parametrizations.weight_norm(net.expert[0], "weight"),
    "checkpoint": lambda net: setattr(net, "expert", checkpoint_wrapper(net.expert)),
    "lora": lambda net: setattr(net, "expert", Lora(net.expert)),
    "a new layer": grow,
    "a new tensor": lambda net: setattr(
        net.expert[0], "weight", nn.Parameter(torch.randn(WIDTH, WIDTH))
    ),
}


def batch(step: int) -> Tensor:
    return drawn(5, WIDTH, step=step)


def assert_local(*tensors: Tensor | None) -> None:
    for each in zip(*gather(tensors), strict=True):
        assert not torch.equal(*each), "the same on both ranks"


@pytest.mark.parametrize("bias", [True, False], ids=["", "no bias"])
@ranks(2)
def test_an_ignored_part_that_changes_stays_rank_local(rank: int, bias: bool) -> None:
    for change in CHANGES.values():
        net = Net(bias=bias)
        ddp = DistributedDataParallel(net)
        for step in range(2):
            train_step(ddp, batch(step))
        alone = copy.deepcopy(net)
        for each in net, alone:
            torch.manual_seed(rank)
            change(each)
        for step in range(2, 5):
            for each in ddp, alone:
                train_step(each, batch(step))
            own = dict(alone.named_parameters())
            for name, param in net.named_parameters():
                if "expert" in name:
                    assert_same_bits([param, param.grad], [own[name], own[name].grad])
            assert_same_on_all_ranks([param.grad for param in net.shared.parameters()])
        ddp.check_sync()
        expert = [param for param in net.expert.parameters() if param.dim() > 1]
        assert_local(*expert, *(param.grad for param in expert))


@ranks(2)
def test_a_reduced_parameter_that_gets_an_ignored_name_is_still_reduced() -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    train_step(ddp, batch(0))
    net.shared, net.expert = net.expert, nn.Sequential(net.shared)  # 'expert.0.weight' is reduced
    for step in range(1, 3):
        train_step(ddp, batch(step))
        assert_same_on_all_ranks([param.grad for param in net.expert.parameters()])
        assert_local(net.shared[0].weight.grad)


@ranks(2)
def test_a_later_parameter_with_a_name_in_parameters_to_ignore_is_ignored() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    train_step(ddp, batch(0))
    ddp.parameters_to_ignore.update({"1.weight", "1.bias"})
    torch.manual_seed(dist.get_rank())
    ddp.module.append(nn.Linear(WIDTH, WIDTH))
    train_step(ddp, batch(1))
    assert_local(ddp.module[1].weight, ddp.module[1].weight.grad)
    assert_same_on_all_ranks([ddp.module[0].weight.grad])


def test_a_copy_finds_ignored_parameters_by_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ignored = pickle.loads(pickle.dumps(Ignored(net, {"1.weight"})))
    assert [name for name, _ in ignored.parameters(net)] == ["0.weight", "0.bias", "1.bias"]


@ranks(2)
def test_a_module_without_parameters_that_a_forward_assigns_costs_no_search() -> None:
    class Assigns(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.criterion = nn.MSELoss()
            return self.criterion(self[0](x), x)

    ddp = DistributedDataParallel(Assigns(nn.Linear(WIDTH, WIDTH)))
    for step in range(2):
        train_step(ddp, batch(step), loss=torch.sum)
    with mock.patch.object(ModuleParameters, "update") as searches:
        for step in range(3):
            train_step(ddp, batch(step), loss=torch.sum)
    assert not searches.called
    ddp.module.criterion.register_parameter("scale", nn.Parameter(torch.ones(1)))
    finds = mock.patch.object(ModuleParameters, "update", side_effect=KeyError)
    with finds, pytest.raises(KeyError):
        ddp(batch(3))


def test_replaced_ignored_parameters_are_freed() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ignored = Ignored(net, {"1.weight", "1.bias"})
    freed = []
    for _ in range(3):
        net[1].weight = nn.Parameter(torch.ones(2, 2))
        freed.append(weakref.ref(net[1].weight))
        assert [name for name, _ in ignored.parameters(net)] == ["0.weight", "0.bias"]
    gc.collect()
    assert [each() is None for each in freed] == [True, True, False]


@ranks(2)
def test_a_module_that_was_used_twice_may_get_a_buffer(rank: int) -> None:
    net = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Dropout(), nn.Linear(WIDTH, WIDTH))
    ddp = DistributedDataParallel(net.eval())
    train_step(ddp, batch(0))
    net[2] = net[1]
    train_step(ddp, batch(1))
    net[1] = nn.Identity()
    train_step(ddp, batch(2))
    net[2].register_buffer("z", torch.tensor(float(rank)))
    train_step(ddp, batch(3))
    assert net[2].z == 0


def nest(net: nn.Sequential) -> Tensor:
    """The new place of the ignored weight."""
    net[1] = nn.Sequential(net[1])
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    return net[1][0].weight


def parametrize(net: nn.Sequential) -> Tensor:
    parametrizations.weight_norm(net[1])
    return net[1].parametrizations.weight.original1


@ranks(2)
def test_an_ignored_weight_of_a_layer_with_a_reduced_bias_may_be_replaced() -> None:
    for change in (nest, parametrize):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(net[1].weight)
        net._ddp_params_and_buffers_to_ignore = ["1.weight"]
        ddp = DistributedDataParallel(net)
        train_step(ddp, batch(0))
        weight = change(net)
        for step in range(1, 3):
            train_step(ddp, batch(step))
        assert_local(weight, weight.grad)
        for name, param in net.named_parameters():
            if "bias" in name:
                assert_same_on_all_ranks([param, param.grad], name)
