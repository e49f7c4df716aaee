"""Parameters and buffers that are ignored at wrapping stay rank-local under any later name."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from training import drawn, train_step

from tritonddp import DistributedDataParallel
from tritonddp.buckets.ignored import Ignored

WIDTH = 4


class Net(nn.Module):
    """A shared layer, and a rank-local expert."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(100 + dist.get_rank())
        self.expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        names = [f"expert.{name}" for name, _ in self.expert.named_parameters()]
        names += [f"expert.{name}" for name, _ in self.expert.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = names

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.shared(x))


CHANGES: dict[str, Callable[[Net], Any]] = {
    "in a Sequential": lambda net: setattr(net, "expert", nn.Sequential(net.expert, nn.Tanh())),
    "pruned": lambda net: prune.random_unstructured(net.expert[0], "weight", 0.5),
    "parametrized": lambda net: parametrizations.weight_norm(net.expert[0], "weight"),
    "a new layer": lambda net: net.expert.append(nn.Linear(WIDTH, WIDTH)),
    "a new parameter": lambda net: setattr(
        net.expert[0], "weight", nn.Parameter(torch.randn(WIDTH, WIDTH))
    ),
}


def batch(step: int) -> Tensor:
    return drawn(5, WIDTH, step=step)


def assert_local(*tensors: Tensor | None) -> None:
    for each in zip(*gather(tensors), strict=True):
        assert not torch.equal(*each), "the same on both ranks"


@ranks(2)
def test_an_ignored_part_that_changes_stays_rank_local(rank: int) -> None:
    for change in CHANGES.values():
        net = Net()
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


@ranks(2)
def test_a_submodule_that_was_used_twice_may_get_a_buffer(rank: int) -> None:
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
