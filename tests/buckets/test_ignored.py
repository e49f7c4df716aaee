"""What is ignored at wrapping stays with its rank, whatever its name becomes."""

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
from training import assert_gradients_alike, drawn, train_step

from tritonddp import DistributedDataParallel
from tritonddp.buckets.ignored import Ignored
from tritonddp.buckets.parameters import ModuleParameters

WIDTH = 4


class Net(nn.Module):
    """A layer of all ranks, and an expert of each rank's own."""

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


def assert_local(tensors: list[Tensor | None]) -> None:
    for each in zip(*gather(tensors), strict=True):
        assert not torch.equal(*each), "the same on both ranks"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("bias", [True, False], ids=["", "no bias"])
@ranks(2)
def test_an_ignored_part_that_changes_stays_with_its_rank(
    rank: int, change: str, bias: bool
) -> None:
    net = Net(bias=bias)
    ddp = DistributedDataParallel(net)
    for step in range(2):
        train_step(ddp, batch(step))
    alone = copy.deepcopy(net)
    for each in net, alone:
        torch.manual_seed(rank)
        CHANGES[change](each)
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
    assert_local([*expert, *(param.grad for param in expert)])


@ranks(2)
def test_ignored_buffers_of_a_part_that_is_renamed_are_not_broadcast(rank: int) -> None:
    """Stock DDP goes by their names in each forward, and overwrites them then."""
    net = Net()
    net.register_buffer("shared_count", torch.zeros(1))
    ddp = DistributedDataParallel(net)
    train_step(ddp, batch(0))
    put_in_a_sequential(net)
    for step in range(1, 3):
        net.shared_count.fill_(rank)
        train_step(ddp, batch(step))
        assert net.shared_count.item() == 0
    assert_local([net.expert[0][1].running_mean])


@ranks(2)
def test_what_is_reduced_stays_so_under_a_name_that_is_ignored() -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    train_step(ddp, batch(0))
    net.shared, net.expert = net.expert, nn.Sequential(net.shared)  # 'expert.0.weight' is reduced
    for step in range(1, 3):
        train_step(ddp, batch(step))
        assert_same_on_all_ranks([param.grad for param in net.expert.parameters()])
        assert_local([net.shared[0].weight.grad])


@ranks(2)
def test_a_name_that_is_added_to_the_list_is_ignored_when_it_comes() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    train_step(ddp, batch(0))
    ddp.parameters_to_ignore.update({"1.weight", "1.bias"})
    torch.manual_seed(dist.get_rank())
    ddp.module.append(nn.Linear(WIDTH, WIDTH))
    train_step(ddp, batch(1))
    assert_local([ddp.module[1].weight, ddp.module[1].weight.grad])
    assert_same_on_all_ranks([ddp.module[0].weight.grad])


def test_a_copy_knows_by_name_what_is_ignored() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ignored = pickle.loads(pickle.dumps(Ignored(net, {"1.weight"})))
    assert [name for name, _ in ignored.parameters(net)] == ["0.weight", "0.bias", "1.bias"]


class Cached(nn.Module):
    """Makes a buffer of its rank's own values in the first forward."""

    def __init__(self, makes: str) -> None:
        super().__init__()
        self.layer, self.makes = nn.Linear(WIDTH, WIDTH), makes
        if makes == "value":
            self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.makes == "value" and self.mean is None:
            self.mean = x.detach().mean(0)
        elif self.makes == "buffer" and not hasattr(self, "mean"):
            rows = 1 + dist.get_rank()  # of other sizes
            self.register_buffer("mean", x.detach()[:rows].mean(0, keepdim=True).repeat(rows, 1))
        elif self.makes == "module" and not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(WIDTH, affine=False)
            self.norm.running_mean.fill_(dist.get_rank())
        return self.layer(x)


@pytest.mark.parametrize("makes", ["value", "buffer", "module"])
@ranks(2)
def test_a_module_without_buffers_at_wrapping_is_never_broadcast(makes: str) -> None:
    net = Cached(makes)
    ddp = DistributedDataParallel(net)
    for step in range(3):
        train_step(ddp, batch(step))
        assert_gradients_alike(ddp)
        mean = net.norm.running_mean if makes == "module" else net.mean
        shapes = gather([each.shape for each in net.buffers()])
        assert shapes[0] != shapes[1] or not torch.equal(*gather(mean))
    assert not ddp.will_sync_module_buffers()
    assert not ddp.modules_buffers
    ddp.check_sync()


@pytest.mark.parametrize("others", [True, False], ids=["", "a layer that no rank trains"])
@ranks(2, 3, views=True)
def test_each_rank_may_freeze_what_it_likes_with_the_flag(
    rank: int, others: bool, view: bool
) -> None:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-4, **options)
    for step in range(6):
        for number, layer in enumerate(net):
            is_frozen = number == rank + step % 2 or (not others and number == 3)
            layer.requires_grad_(step == 0 or not is_frozen)
        alone = copy.deepcopy(net)
        for each in ddp, alone:
            train_step(each, batch(step))
        for param, own in zip(net.parameters(), alone.parameters(), strict=True):
            grads = gather(own.grad)
            if any(grad is not None for grad in grads):
                total = sum(torch.zeros_like(own) if grad is None else grad for grad in grads)
                torch.testing.assert_close(param.grad, total / len(grads))


@ranks(2)
def test_a_part_without_parameters_that_a_forward_assigns_costs_no_walk() -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.criterion = nn.MSELoss()
            return self.criterion(self[0](x), x)

    ddp = DistributedDataParallel(Net(nn.Linear(WIDTH, WIDTH)))
    for step in range(2):
        train_step(ddp, batch(step), loss=torch.sum)
    with mock.patch.object(ModuleParameters, "update") as walks:
        for step in range(3):
            train_step(ddp, batch(step), loss=torch.sum)
    assert not walks.called
    ddp.module.criterion.register_parameter("scale", nn.Parameter(torch.ones(1)))
    finds = mock.patch.object(ModuleParameters, "update", side_effect=KeyError)
    with finds, pytest.raises(KeyError):
        ddp(batch(3))


def test_ignored_parameters_that_are_replaced_again_and_again_are_freed() -> None:
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
def test_an_ignored_parameter_beside_a_reduced_one_may_be_replaced_under_another_name() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(net[1].bias)
    net._ddp_params_and_buffers_to_ignore = ["1.bias"]
    ddp = DistributedDataParallel(net)
    train_step(ddp, batch(0))
    net[1] = nn.Sequential(net[1])
    train_step(ddp, batch(1))
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    train_step(ddp, batch(2))
    assert_local([net[1][0].bias, net[1][0].bias.grad])
    assert_same_on_all_ranks([net[1][0].weight, net[1][0].weight.grad])


@ranks(2)
def test_a_part_in_two_places_may_get_a_buffer_when_it_has_left_one_of_them(rank: int) -> None:
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


@ranks(2)
def test_what_replaces_an_ignored_parameter_beside_a_reduced_one_is_ignored() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(net[1].weight)
    net._ddp_params_and_buffers_to_ignore = ["1.weight"]
    ddp = DistributedDataParallel(net)
    train_step(ddp, batch(0))
    parametrizations.weight_norm(net[1])
    for step in range(1, 3):
        train_step(ddp, batch(step))
    weights = net[1].parametrizations.weight
    assert_local([weights.original0, weights.original1.grad])
    assert_same_on_all_ranks([net[1].bias, net[1].bias.grad])
