"""The wrapper's norms and clipping beside torch's own."""

from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import clip_grad_norm_, get_total_norm
from training import drawn, ways

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


@ranks(2)
def test_before_the_first_reduction_it_is_zero() -> None:
    assert wrapped().grad_norm().item() == 0
