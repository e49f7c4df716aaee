"""Gradients are those of stock DDP, and those of one process on the whole batch."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks
from modules import mlp, normed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import assert_gradients_alike, gradients, train_step, wrap

from tritonddp import DistributedDataParallel


def conv() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*layers, nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def scripted() -> nn.Module:
    """Its tables of parameters, buffers and submodules are no dictionaries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))


# Each with the shape of a batch. (tests/differential draws networks of all kinds of parameters.)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(8, 32, 32, 3, activation=nn.ReLU), (4, 8)),
    "conv-channels-last": (conv, (4, 3, 8, 8)),
    "transformer": (transformer, (2, 5, 16)),
    "scripted": (scripted, (4, 8)),
    "a scripted part": (lambda: nn.Sequential(nn.Linear(8, 8), scripted()), (4, 8)),
}


def compare_with_stock(
    model: str, view: bool, set_to_none: bool = True, **options: Any
) -> DistributedDataParallel:
    """Train with stock DDP and with tritonddp beside each other; all that matters is compared."""
    make, shape = MODELS[model]
    nets: list[Any] = []
    for cls in (Stock, DistributedDataParallel):  # (A copy of a scripted module has no leaves.)
        torch.manual_seed(17 + dist.get_rank())  # ranks differ: rank 0's weights must win
        nets.append(cls(make(), gradient_as_bucket_view=view, **options))
    stock, ours = nets
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9) for ddp in (stock, ours)]
    names = [name for name, _ in ours.module.named_parameters()]
    for step in range(4):
        x = torch.randn(shape)
        losses = []
        for ddp, optimizer in zip((stock, ours), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(ddp(x).pow(2).mean())
            losses[-1].backward()
        assert_same_bits(losses[1], losses[0], f"{model}: loss of step {step}")
        assert_same_bits(gradients(ours), gradients(stock), f"{model}: gradients of step {step}")
        for name, expected, param in zip(names, stock.parameters(), ours.parameters(), strict=True):
            what = f"{model}: gradient of {name} in step {step}"
            if dense(param):
                assert param.grad.stride() == param.stride(), what
            else:
                assert param.grad.stride() == expected.grad.stride(), what
            assert (param.grad.dtype, param.grad.shape) == (param.dtype, param.shape), what
        assert_gradients_alike(ours, f"{model}: step {step}")
        for optimizer in optimizers:
            optimizer.step()
        assert_same_on_all_ranks(list(ours.parameters()), f"{model}: parameters after step {step}")
        assert_same_bits(ours.parameters(), stock.parameters(), f"{model}: parameter")
    return ours


def dense(tensor: Tensor) -> bool:
    """No gaps, no overlap."""
    return torch.empty_like(tensor).stride() == tensor.stride()


@ranks(2, views=True)
def test_bit_equal_to_stock_on_two_ranks(view: bool) -> None:
    for model in MODELS:
        for set_to_none in (True, False):
            compare_with_stock(model, view, set_to_none)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@ranks(2, views=True)
def test_nan_and_inf_of_one_rank_reach_every_rank(rank: int, special: float, view: bool) -> None:
    ddp = wrap(nn.Linear(3, 1, bias=False), view)
    for _ in range(3):
        x = torch.ones(1, 3)
        if rank == 1:
            x[0, 1] = special
        train_step(ddp, x, loss=torch.sum)
        expected = torch.tensor([[1.0, special, 1.0]])
        assert_same_bits(ddp.module.weight.grad, expected, "gradient")


@ranks(2)
def test_profiles_show_the_forward_as_stock_ddp_does() -> None:
    spans = []
    for cls in (DistributedDataParallel, Stock):
        ddp = cls(nn.Linear(2, 2))
        with torch.profiler.profile() as profile:
            ddp(torch.ones(1, 2))
        spans += [
            (each.name, each.is_user_annotation)
            for each in profile.events()
            if each.name.startswith("DistributedDataParallel")
        ]
    assert spans == 2 * [("DistributedDataParallel.forward", True)]


OPTIONS_OF_THE_HOST: dict[str, dict[str, Any]] = {
    "defaults": {},
    "process group": {"transport": "process_group"},
    "checked": {"check_finite": "raise"},
    "int8": {"compression": "int8", "metrics": True},
    "int8, in the process group": {"compression": "int8", "transport": "process_group"},
}


@pytest.mark.parametrize("options", OPTIONS_OF_THE_HOST)
@ranks(2)
def test_a_default_device_is_not_that_of_the_wrappers_own_tensors(options: str) -> None:
    """(Inside a backward torch leaves the default device off.)

    As of scripts that say ``torch.set_default_device("cuda")``. "meta" has no values.
    """
    ddp = DistributedDataParallel(normed(40, 40), **OPTIONS_OF_THE_HOST[options])
    batches = [torch.randn(8, 40) for _ in range(3)]
    with torch.device("meta"):
        ddp.reduce_gradients([torch.ones_like(param) for param in ddp.parameters()])
        for batch in batches:
            ddp.zero_grad()
            with ddp.weighted(1):
                ddp(batch).pow(2).mean().backward()
            assert_gradients_alike(ddp)
        for batch in batches:
            ddp.zero_grad()
            ddp(batch).pow(2).mean().backward()
            assert_gradients_alike(ddp)
        ddp.load_comm_state_dict(ddp.comm_state_dict())
        with ddp.join():
            ddp(batches[0]).sum().backward()
        ddp.check_sync()
