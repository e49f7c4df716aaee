"""Gradients are those of stock DDP, and those of one process on the whole batch."""

import copy
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
from training import assert_close, assert_gradients_alike, gradients, train_step, wrap

from tritonddp import DistributedDataParallel


class MixedDtypes(nn.Module):
    """fp32, bf16 and fp64 parameters, taking turns."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.float64] * 2
        self.layers = nn.ModuleList(nn.Linear(8, 8).to(dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


class OddShapes(nn.Module):
    """Parameters without dimensions, without elements, transposed, sliced, of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.transposed = nn.Parameter(torch.randn(6, 8).t())
        self.empty_matrix = nn.Parameter(torch.empty(3, 0))
        self.permuted = nn.Parameter(torch.randn(2, 3, 6).permute(2, 0, 1))
        self.sliced = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.single = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.transposed * self.scalar
        y = y + torch.einsum("bi,ijk->bi", y, self.permuted) + (x[:, :6] @ self.sliced).sum()
        return torch.tanh(y / 10) * self.single.sum() + self.empty.sum() + self.empty_matrix.sum()


class Expanded(nn.Module):
    """All gradients are expanded or transposed where they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = nn.Parameter(torch.randn(5, 7))
        self.row = nn.Parameter(torch.randn(8))
        self.flipped = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.summed.sum() * x.mean() + x * self.row.expand(4, 8) + (x @ self.flipped.t())


def tied() -> nn.Module:
    """One weight under two names, used twice."""
    layers = mlp(8, 8, 8)
    layers[2].weight = layers[0].weight
    return layers


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


# Each with the shape of a batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(8, 32, 32, 3, activation=nn.ReLU), (4, 8)),
    "conv-channels-last": (conv, (4, 3, 8, 8)),
    "transformer": (transformer, (2, 5, 16)),
    "mixed-dtypes": (MixedDtypes, (4, 8)),
    "tied": (tied, (4, 8)),
    "odd-shapes": (OddShapes, (4, 8)),
    "expanded": (Expanded, (4, 8)),
    "scripted": (scripted, (4, 8)),
    "a scripted part": (lambda: nn.Sequential(nn.Linear(8, 8), scripted()), (4, 8)),
}
MODEL = pytest.mark.parametrize("model", list(MODELS))


def compare_with_stock(
    name: str, view: bool, set_to_none: bool = True, same_bits: bool = True, **options: Any
) -> DistributedDataParallel:
    """Train with stock DDP and with tritonddp beside each other; all that matters is compared."""
    make, shape = MODELS[name]
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
        if same_bits:
            assert_same_bits(losses[1], losses[0], f"loss of step {step}")
            assert_same_bits(gradients(ours), gradients(stock), f"gradients of step {step}")
        else:
            assert_close(gradients(ours), gradients(stock), f"gradients of step {step}")
        for name, expected, param in zip(names, stock.parameters(), ours.parameters(), strict=True):
            what = f"gradient of {name} in step {step}"
            if dense(param):
                assert param.grad.stride() == param.stride(), what
            else:
                assert param.grad.stride() == expected.grad.stride(), what
            assert (param.grad.dtype, param.grad.shape) == (param.dtype, param.shape), what
        assert_gradients_alike(ours, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
        assert_same_on_all_ranks(list(ours.parameters()), f"parameters after step {step}")
        if same_bits:
            assert_same_bits(ours.parameters(), stock.parameters(), "parameter")
    return ours


def dense(tensor: Tensor) -> bool:
    """No gaps, no overlap."""
    return torch.empty_like(tensor).stride() == tensor.stride()


@MODEL
@ranks(2, views=True)
def test_bit_equal_to_stock_on_two_ranks(model: str, view: bool) -> None:
    compare_with_stock(model, view)


@MODEL
@ranks(2, views=True)
def test_bit_equal_to_stock_with_gradients_zeroed_in_place(model: str, view: bool) -> None:
    compare_with_stock(model, view, set_to_none=False)


@pytest.mark.parametrize("model", ["mlp", "transformer", "mixed-dtypes", "odd-shapes"])
@ranks(2, views=True)
def test_bit_equal_to_stock_with_small_buckets(model: str, view: bool) -> None:
    ddp = compare_with_stock(model, view, bucket_cap_mb=1e-6)
    assert all(
        bucket.flat.payload.numel() == 0 or sum(param.numel() > 0 for param in bucket.params) == 1
        for bucket in ddp.reducer.buckets
    )


@ranks(2, views=True)
def test_bit_equal_to_stock_with_a_list_of_bucket_sizes(view: bool) -> None:
    kib = 1 / 1024
    ddp = compare_with_stock("transformer", view, bucket_cap_mb_list=[kib / 4, 2 * kib, 5 * kib])
    sizes = [
        [param.numel() * param.element_size() for param in bucket.params]
        for bucket in ddp.reducer.buckets
    ]
    for bucket, limit in zip(sizes, [256, 2048] + [5120] * len(sizes), strict=False):
        assert sum(bucket[:-1]) < limit, "a bucket went on after it had reached its limit"
    for bucket, limit in zip(sizes[:-1], [256, 2048] + [5120] * len(sizes), strict=False):
        assert sum(bucket) >= limit, "a bucket was closed before it had reached its limit"
    assert len(sizes) >= 4


@pytest.mark.parametrize("model", ["mlp", "conv-channels-last", "odd-shapes"])
@ranks(3, 4, views=True)
def test_equal_to_stock_to_rounding_on_three_and_four_ranks(model: str, view: bool) -> None:
    compare_with_stock(model, view, same_bits=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@ranks(2, 3, 4, views=True)
def test_equal_to_one_process_on_the_whole_batch(rank: int, dtype: torch.dtype, view: bool) -> None:
    size = dist.get_world_size()
    for make, (batch, *shape) in (MODELS["mlp"], MODELS["transformer"]):
        alone, ddp = (copy.deepcopy(module).to(dtype) for module in [make()] * 2)
        ddp = wrap(ddp, view)
        for _ in range(3):
            whole = torch.randn(size * batch, *shape, dtype=dtype)  # ranks are seeded alike
            alone.zero_grad()
            alone(whole).pow(2).mean().backward()
            ddp.zero_grad()
            ddp(whole[rank * batch : (rank + 1) * batch]).pow(2).mean().backward()
            torch.testing.assert_close(gradients(ddp), gradients(alone))


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


@ranks(2, views=True)
def test_gradients_written_by_users_are_reduced_as_they_are(rank: int, view: bool) -> None:
    """Hooks of users run before ours, in every place where torch lets them put one."""
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.weight.register_hook(lambda grad: grad * 3)
        model.bias.register_post_accumulate_grad_hook(
            lambda param: setattr(param, "grad", param.grad.double().float() + 1)
        )
    stock = Stock(models[0], gradient_as_bucket_view=view)
    ours = wrap(models[1], view)
    for _ in range(3):
        x = torch.randn(2, 4) * (1 + rank)
        for ddp in (stock, ours):
            train_step(ddp, x)
        assert_same_bits(gradients(ours), gradients(stock), "gradient")


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
