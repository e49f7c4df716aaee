"""Gradients of every kind in one model, under every option that decides how they travel."""

from functools import partial
from typing import Any

import pytest
import torch
from distributed import ranks
from oracle import Alone, play
from torch import Tensor, nn
from training import assert_close

from tritonddp import DistributedDataParallel


class NoGradient(torch.autograd.Function):
    """Gives its weight no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class EveryKind(nn.Module):
    """Sparse, complex, channels last, of many dtypes, empty, tied, unused, undefined."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True).double()
        self.narrow_table = nn.Embedding(9, 4, sparse=True)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Linear(4, 4).bfloat16()
        self.double_ = nn.Linear(4, 4).double()
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.tensor(1 + 1j, dtype=torch.complex128))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 4).t())
        self.expanded = nn.Parameter(torch.randn(5))
        self.undefined = nn.Parameter(torch.randn(2))
        self.never = nn.Parameter(torch.randn(2))
        self.sometimes = nn.Linear(4, 4).double()
        self.out = nn.Linear(4, 9, bias=False).double()
        self.tied = nn.Linear(4, 9, bias=False).double()
        self.tied.weight = self.out.weight

    def forward(self, count: int, sometimes: bool) -> Tensor:
        rows = torch.randint(9, (count,))
        x = self.table(rows).sum(0) + self.narrow_table(rows).sum(0)
        x = x + self.conv(torch.randn(1, 3, 5, 5)).mean((0, 2, 3)).double()
        x = self.narrow(self.double_(x).bfloat16())
        x = (x.to(torch.complex64) @ self.mix.conj() * self.phase).abs().double()
        x = x * self.scalar + (x.float() @ self.transposed).double()
        x = NoGradient.apply(x + self.expanded.sum() + self.empty.sum(), self.undefined)
        if sometimes:
            x = self.sometimes(x)
        return torch.tanh(self.out(x)).sum() + torch.tanh(self.tied(x)).sum()


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small buckets": {"bucket_cap_mb": 1e-5},
    "static graph": {"static_graph": True},
    "half on the wire": {"reduce_dtype": torch.bfloat16, "bucket_cap_mb": 1e-5},
    "checked": {"check_finite": "raise", "bucket_cap_mb": 1e-5},
    "memory on demand": {"lazy_bucket_allocation": True, "bucket_cap_mb": 1e-5},
}


def backwards(net: Any, rank: int, step: int) -> None:
    net.zero_grad()
    if step % 2:
        with net.no_sync():
            net(2, rank == 0).backward()
    net(1 + rank + step, rank == 1).backward(create_graph=step == 3)


@pytest.mark.parametrize("options", OPTIONS)
@ranks(2)
def test_the_mean_of_every_kind_of_gradient(options: str) -> None:
    for view in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(EveryKind(), gradient_as_bucket_view=view, **OPTIONS[options])
        alone = []
        for _ in range(2):
            torch.manual_seed(0)
            alone.append(Alone(EveryKind()))
        for step in range(4):
            play(partial(backwards, step=step), ddp, alone, step)
            for (name, param), *own in zip(
                ddp.named_parameters(), *(net.parameters() for net in alone), strict=True
            ):
                terms = [each.grad.detach().to_dense() for each in own if each.grad is not None]
                where = f"{name}, view={view}, step {step}"
                assert (param.grad is None) == (not terms), where
                if terms:
                    is_low = torch.bfloat16 in (param.dtype, OPTIONS[options].get("reduce_dtype"))
                    tolerance = 1e-2 if is_low else 1e-5
                    found, mean = param.grad.detach().to_dense(), sum(terms) / 2
                    assert_close(found, mean, where, rtol=tolerance, atol=tolerance)
                    assert param.grad.is_sparse == ("table" in name), where
