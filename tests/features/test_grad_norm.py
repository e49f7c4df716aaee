"""The wrapper's norms and clipping beside torch's own."""

from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import clip_grad_norm_, get_total_norm
from training import Operators, breaking_off, drawn, gradients, train_step, ways

from tritonddp import DistributedDataParallel

WAYS = ways("copies", "process group", "views", "lazy", "lazy views", "bf16", "bf16 views", "int8")
WAYS |= ways("finite", "mixed")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


class Net(nn.Module):
    """Small gradients and large ones, in several memory orders."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 150, dtype=dtype)
        self.second = nn.Linear(150, 300, dtype=dtype)
        self.last = nn.Linear(300, 3, bias=False, dtype=dtype)
        self.spare = nn.Parameter(torch.randn(9, 5, dtype=dtype).t())
        self.dtype = dtype

    def forward(self, inputs: Tensor, spare: bool = True) -> Tensor:
        out = self.last(self.second(self.first(inputs)))
        return out.abs().square().mean() + (self.spare.abs().sum() if spare else 0)


def wrapped(dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    small = {"bucket_cap_mb": 0.1}
    return DistributedDataParallel(Net(dtype), **{**small, **options})


def step(ddp: DistributedDataParallel, number: int = 0, scale: float = 1.0, **forward: Any) -> None:
    inputs = drawn(4, 40, step=number).to(ddp.module.dtype)
    (ddp(inputs, **forward) * scale).backward()


def trained(*args: Any, **options: Any) -> DistributedDataParallel:
    ddp = wrapped(*args, **options)
    train(ddp)
    return ddp


def train(ddp: DistributedDataParallel, steps: int = 3, **forward: Any) -> None:
    """Some steps, until buckets have their final form."""
    for number in range(steps):
        ddp.zero_grad()
        step(ddp, number, **forward)


def dense(grad: Tensor) -> Tensor:
    wide = torch.complex128 if grad.is_complex() else torch.float64
    return (grad.to_dense() if grad.is_sparse else grad).to(wide)


def expected(module: nn.Module) -> float:
    grads = [dense(p.grad).flatten().abs() for p in module.parameters() if p.grad is not None]
    return torch.cat(grads).norm().item() if grads else 0.0


def is_right(ddp: DistributedDataParallel, rel: float = 1e-6) -> None:
    """The norm is that of all gradients, the same bits on all ranks."""
    found = ddp.grad_norm()
    assert found.dim() == 0
    is_double = any(p.dtype in (torch.float64, torch.complex128) for p in ddp.module.parameters())
    assert found.dtype is (torch.float64 if is_double else torch.float32)
    assert found.item() == pytest.approx(expected(ddp.module), rel=rel, nan_ok=True)
    assert_same_on_all_ranks([found])


def clips_as_torch(ddp: DistributedDataParallel, share: float, rel: float = 2e-6) -> None:
    """Clipped to a share of the norm, gradients are what torch's own function makes of them."""
    params = [param for param in ddp.module.parameters() if param.grad is not None]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    for twin, param in zip(twins, params, strict=True):
        twin.grad = param.grad.clone()
    max_norm = share * expected(ddp.module)
    ours, theirs = ddp.clip_grad_norm_(max_norm), clip_grad_norm_(twins, max_norm)
    assert ours.item() == pytest.approx(theirs.item(), rel=max(rel, 1e-5))
    for twin, param in zip(twins, params, strict=True):
        unit = torch.finfo(param.dtype).tiny * torch.finfo(param.dtype).eps  # the least number
        torch.testing.assert_close(param.grad, twin.grad, rtol=max(rel, 1e-5), atol=unit)
    is_right(ddp)
    assert_same_on_all_ranks([param.grad for param in params])


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_norms_and_clipping_are_torchs_however_gradients_travel(way: str) -> None:
    ddp = wrapped(**WAYS[way])
    for number in range(4):
        ddp.zero_grad(set_to_none=number != 2)
        step(ddp, number)
        is_right(ddp)
        torch.testing.assert_close(
            ddp.grad_norm(), get_total_norm([p.grad for p in ddp.parameters()])
        )
    clips_as_torch(ddp, 0.3)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(2)
def test_norms_and_clipping_are_torchs_in_every_dtype(dtype: torch.dtype, views: bool) -> None:
    ddp = trained(dtype, gradient_as_bucket_view=views)
    is_right(ddp)
    clips_as_torch(ddp, 0.3, rel=2e-2 if dtype.itemsize == 2 else 2e-6)


def with_gradient(tensor: Tensor) -> nn.Parameter:
    param = nn.Parameter(tensor)
    param.grad = tensor * 7
    return param


@ranks(2)
def test_an_overflow_in_fp16_is_seen_and_said(rank: int) -> None:
    ddp = trained(torch.float16)
    ddp.zero_grad()
    step(ddp, scale=1e6 if rank == 1 else 1.0)
    found = ddp.grad_norm()
    assert not found.isfinite()
    with pytest.raises(RuntimeError, match=r"rank \d, step 4: the total norm .* is non-finite"):
        ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)
    before = gradients(ddp)
    ddp.clip_grad_norm_(1.0)
    twins = [nn.Parameter(param.detach().clone()) for param in ddp.parameters()]
    for twin, grad in zip(twins, before, strict=True):
        twin.grad = grad
    clip_grad_norm_(twins, 1.0)
    for twin, param in zip(twins, ddp.parameters(), strict=True):
        torch.testing.assert_close(param.grad, twin.grad, equal_nan=True)


@ranks(2)
def test_sparse_gradients_count_by_their_values(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)))
    for number in range(3):
        train_step(ddp, torch.tensor([1, 1, 3 + rank, number]))
        is_right(ddp)
    before = ddp.grad_norm()
    ddp.clip_grad_norm_(before.item() / 2)
    assert ddp.module[0].weight.grad.is_sparse
    assert expected(ddp.module) == pytest.approx(before.item() / 2, rel=1e-5)
    is_right(ddp)


@ranks(2)
def test_parameters_that_are_not_reduced_count_as_for_torch() -> None:
    module = Net()
    module.own = with_gradient(torch.ones(4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own"])
    ddp = DistributedDataParallel(module)
    step(ddp)
    is_right(ddp)
    clips_as_torch(ddp, 0.5)


@ranks(2)
def test_norms_by_parameter() -> None:
    ddp = trained()
    ddp.module.spare.grad = None
    found = ddp.grad_norm(per_parameter=True)
    named = {name: param for name, param in ddp.module.named_parameters() if name != "spare"}
    assert found.keys() == named.keys()
    for name, param in named.items():
        assert found[name].dim() == 0
        assert found[name].item() == pytest.approx(param.grad.double().norm().item(), rel=1e-6)
    assert_same_on_all_ranks(list(found.values()))


@ranks(1)
def test_a_pass_is_no_more_operations_for_more_parameters() -> None:
    def operations(number: int) -> int:
        dtypes = [torch.float32, torch.bfloat16, torch.float64] * number
        params = [nn.Parameter(torch.randn(5, dtype=dtype)) for dtype in dtypes]
        ddp = DistributedDataParallel(nn.ParameterList(params))
        for param in params:
            param.grad = torch.randn_like(param)
        with Operators() as operators:
            ddp.clip_grad_norm_(0.5)
        assert expected(ddp.module) == pytest.approx(0.5, rel=1e-2)
        return operators.counts.total()

    assert operations(2) == operations(40) > 0


@ranks(2)
def test_before_the_first_reduction_and_after_one_that_broke_off() -> None:
    ddp = wrapped()
    assert ddp.grad_norm().item() == 0
    train(ddp)
    ddp.zero_grad()

    with breaking_off(ddp.module.first.weight):
        step(ddp)
    assert ddp.grad_norm().item() == pytest.approx(expected(ddp.module), rel=1e-6)
    ddp.zero_grad()
    step(ddp)
    is_right(ddp)


@ranks(2)
def test_what_cannot_be_answered_is_refused_by_name() -> None:
    ddp = trained()
    said: list[str] = []

    def ask(param: Tensor) -> None:
        try:
            ddp.grad_norm()
        except RuntimeError as error:
            said.append(str(error))

    handle = ddp.module.last.weight.register_post_accumulate_grad_hook(ask)
    step(ddp)
    handle.remove()
    assert len(said) == 1
    assert "grad_norm() while a backward runs" in said[0]
    ddp.require_manual_backward_finalization = True
    step(ddp)
    with pytest.raises(RuntimeError, match="finalize_backward"):
        ddp.clip_grad_norm_(1.0)
    ddp.finalize_backward()
    is_right(ddp)
    module = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1e-3})
    stepping = DistributedDataParallel(module)
    step(stepping)
    for call in (stepping.grad_norm, lambda: stepping.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="where optimizers step in the backward"):
            call()
