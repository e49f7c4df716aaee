"""``mixed_precision``: low precision in the module and on the wire, full precision outside."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from modules import TiedTable, mlp
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint
from training import drawn, gradients, train_step, wrap

from tritonddp import DistributedDataParallel

HALF = _MixedPrecision(param_dtype=torch.bfloat16)


class Net(nn.Module):
    """Two layers share their weight, one is unused, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("shift", torch.full((4,), 0.3))
        self.register_buffer("count", torch.tensor(0))
        self.seen: list[Any] = []

    def forward(self, inputs: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        self.seen = [inputs.dtype, more["x"][0].dtype, more["number"].dtype, self.shift.dtype]
        self.seen += [param.dtype for param in self.parameters()]
        hidden = self.tied(self.first(inputs).tanh()) + more["x"][0]
        return {"out": self.frozen(hidden) @ self.first.weight}


def inputs(rank: int, step: int = 0) -> tuple[Tensor, dict[str, Any]]:
    x = drawn(2, 3, 4, step=step, rank=rank)
    return x[0], {"x": [x[1]], "number": torch.tensor([3])}


def local_gradients(config: _MixedPrecision, rank: int, step: int) -> dict[str, Tensor]:
    """The gradients of one rank: parameters and inputs are converted by hand."""
    module = Net()
    low = {name: param.to(config.param_dtype) for name, param in module.named_parameters()}
    x, more = inputs(rank, step)
    if config.param_dtype is not None:
        x, more["x"] = x.to(config.param_dtype), [more["x"][0].to(config.param_dtype)]
    functional_call(module, low, (x, more))["out"].sum().backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def mean(config: _MixedPrecision, of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """With the rounding of the wire format."""
    wire = config.reduce_dtype or config.param_dtype or torch.float32
    return {
        name: sum((each[name] / len(of_ranks)).to(wire) for each in of_ranks).float()  # type: ignore
        for name in of_ranks[0]
    }


CONFIGS = {
    "half": _MixedPrecision(torch.float16, torch.float16, torch.float16),
    "reduced in full": _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    "buffers": _MixedPrecision(buffer_dtype=torch.float64),
}


@pytest.mark.parametrize("name", CONFIGS)
@ranks(2, views=True)
def test_the_mean_of_low_gradients_in_full_precision(name: str, view: bool) -> None:
    config = CONFIGS[name]
    module = Net()
    state = copy.deepcopy(module.state_dict())
    ddp = wrap(module, view, mixed_precision=config)
    low = config.param_dtype or torch.float32
    for step in range(3):
        loss = ddp(*inputs(dist.get_rank(), step))["out"].sum()
        assert loss.dtype == low
        number, buffer, *params = module.seen[2:]
        assert {*module.seen[:2], *params} == {low}
        assert number == torch.int64
        assert buffer == (config.buffer_dtype or torch.float32)
        assert {param.dtype for param in ddp.parameters()} == {torch.float32}
        loss.backward()
        expected = mean(config, [local_gradients(config, rank, step) for rank in range(2)])
        for name, param in module.named_parameters():
            assert_same_bits(param.grad, expected.get(name), f"step {step}: {name}")
        ddp.zero_grad()
    for name, value in module.named_parameters():
        assert_same_bits(value.detach(), state[name], name)
    assert module.count.dtype == torch.int64


@ranks(2, views=True)
def test_accumulated_in_full_precision(view: bool) -> None:
    config = _MixedPrecision(torch.bfloat16, torch.float32)
    module = Net()
    ddp = wrap(module, view, mixed_precision=config)
    for number in range(2):
        with ddp.no_sync():
            ddp(*inputs(dist.get_rank(), 0))["out"].sum().backward()
        mine = local_gradients(config, dist.get_rank(), 0)
        assert_same_bits(module.first.weight.grad, mine["first.weight"], "under no_sync")
        ddp(*inputs(dist.get_rank(), 1))["out"].sum().backward()
        sums = []
        for rank in range(2):
            steps = [local_gradients(config, rank, step) for step in range(2)]
            sums.append({name: steps[0][name] + steps[1][name] for name in steps[0]})
        for name, want in mean(config, sums).items():
            assert_same_bits(module.get_parameter(name).grad, want, f"{number}: {name}")
        ddp.zero_grad()


@ranks(2)
def test_ignored_parameters_and_buffers_keep_their_dtype() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias", "1.running_mean"]  # type: ignore[assignment]
    config = _MixedPrecision(torch.bfloat16, None, torch.bfloat16)
    ddp = DistributedDataParallel(module, mixed_precision=config)
    seen = []
    module[1].forward = lambda x: seen.append([p.dtype for p in module.parameters()]) or x  # type: ignore
    ddp(torch.ones(2, 4))
    assert seen == [[torch.bfloat16] * 2 + [torch.float32] * 2]
    assert module[1].running_mean.dtype == torch.float32
    assert module[1].running_var.dtype == torch.bfloat16


class Blocks(nn.Sequential):
    """Layers, each in a checkpoint; or without checkpoints, if ``options`` is None."""

    options: dict[str, bool] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x) if self.options is None else checkpoint(block, x, **self.options)
        return x.square().sum()


@ranks(2)
def test_a_checkpoint_recomputes_in_low_precision() -> None:
    grads = []
    for options in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        torch.manual_seed(0)
        ddp = wrap(Blocks(mlp(4, 4, 4), *mlp(4, 4)), mixed_precision=HALF)
        ddp.module.options = options
        for step in range(3):
            ddp.zero_grad()
            ddp(drawn(2, 4, step=step).requires_grad_()).backward()
        grads.append(gradients(ddp))
    assert_same_bits(grads[1], grads[0], "gradient of a reentrant checkpoint")
    assert_same_bits(grads[2], grads[0], "gradient of a checkpoint")


@ranks(2)
def test_a_copy_of_the_module_recomputes_in_full_precision() -> None:
    module = Blocks(*mlp(4, 4, 4))
    module.options = {"use_reentrant": False}
    plain = copy.deepcopy(module)
    ddp = DistributedDataParallel(module, mixed_precision=HALF)
    ddp(drawn(2, 4)).backward()
    for each in (copied := copy.deepcopy(module), plain):
        each.zero_grad()
        each(drawn(2, 4)).backward()
    assert_same_bits(gradients(copied), gradients(plain))


@ranks(2)
def test_recurrent_layers() -> None:
    ddp = DistributedDataParallel(nn.LSTM(4, 4, num_layers=2), mixed_precision=HALF)
    output, _ = ddp(torch.randn(3, 2, 4))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert {param.grad.dtype for param in ddp.parameters()} == {torch.float32}
    assert all(map(lambda a, b: a is b, ddp.module._flat_weights, ddp.module.parameters()))


@ranks(2)
def test_between_forward_and_backward_the_module_is_in_full_precision() -> None:
    """With stock, its parameters are in low precision."""
    ddp = DistributedDataParallel(Net(), mixed_precision=HALF)
    with torch.no_grad():
        assert ddp(*inputs(0))["out"].dtype == torch.bfloat16
    loss = ddp(*inputs(0))["out"].sum()
    assert {each.dtype for each in ddp.state_dict().values()} == {torch.float32, torch.int64}
    assert ddp.module.first(torch.ones(4)).dtype == torch.float32
    loss.backward()
    assert ddp.module.first(torch.ones(4)).dtype == torch.float32


@ranks(2, views=True)
def test_sparse_gradients(rank: int, view: bool) -> None:
    module = TiedTable(6, 4)
    ddp = wrap(copy.deepcopy(module), view, mixed_precision=HALF)
    for is_dense in (False, True, False):
        train_step(ddp, torch.tensor([rank, 3, 3 + rank]), is_dense, loss=torch.sum)
        means = torch.zeros(6, 4)
        for each in range(2):
            low = {"table.weight": module.table.weight.detach().bfloat16().requires_grad_()}
            functional_call(module, low, (torch.tensor([each, 3, 3 + each]), is_dense)).backward()
            means += low["table.weight"].grad.to_dense().float() / 2
        grad = ddp.module.table.weight.grad
        assert grad.dtype == torch.float32
        assert grad.is_sparse is not is_dense
        torch.testing.assert_close(grad.to_dense(), means, rtol=1e-2, atol=1e-2)
    assert ddp.module.table.weight.dtype == torch.float32
