"""Complex parameters: their gradients travel as real numbers and come back complex."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from oracle import assert_mean, one_per_rank, seed
from torch import Tensor, nn
from training import wrap

from tritonddp import DistributedDataParallel


class Complex(nn.Module):
    """Complex parameters of odd shapes and orders, between real ones."""

    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        self.first = nn.Linear(4, 6, dtype=real)
        self.mix = nn.Parameter(torch.randn(6, 5, dtype=dtype))
        self.transposed = nn.Parameter(torch.randn(5, 5, dtype=dtype).t())
        self.sliced = nn.Parameter(torch.randn(5, 6, dtype=dtype)[:, ::2])
        self.conjugate = nn.Parameter(torch.randn(5, dtype=dtype))
        self.scalar = nn.Parameter(torch.tensor(1.5 - 0.5j, dtype=dtype))
        self.empty = nn.Parameter(torch.empty(0, dtype=dtype))
        self.phase = nn.Parameter(torch.tensor(0.3, dtype=real))
        self.sometimes = nn.Parameter(torch.randn(3, dtype=dtype))
        self.never = nn.Parameter(torch.randn(2, dtype=dtype))

    def forward(self, x: Tensor, sometimes: bool = True) -> Tensor:
        z = self.first(x).to(self.mix.dtype) @ self.mix @ self.transposed + self.conjugate.conj()
        z = z * self.scalar @ self.sliced + self.empty.sum()
        # Autograd gives `phase` the imaginary part of a conjugate: a number flagged as negative.
        z = z * torch.complex(torch.ones_like(self.phase), self.phase).conj()
        if sometimes:
            z = z + self.sometimes
        return z.abs().square().mean()

    @staticmethod
    def batch() -> Tensor:
        return torch.randn(3, 4, dtype=torch.float64)


def train(
    net: Any, rank: int, step: int, dtype: torch.dtype = torch.complex128, no_sync: bool = True
) -> None:
    """Two microbatches; ``sometimes`` is used on one rank, and at first under no_sync only."""
    seed(rank, step)
    real = torch.float32 if dtype == torch.complex64 else torch.float64
    if no_sync:
        with net.no_sync():
            net(Complex.batch().to(real), sometimes=rank == 1).backward()
    net(Complex.batch().to(real), sometimes=rank == 1 and step > 1).backward()


@ranks(2)
def test_conjugate_parameters_start_as_those_of_rank_0(rank: int) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((3,), complex(rank + 1, 2)).conj())
    assert model.weight.is_conj()
    DistributedDataParallel(model)
    assert model.weight.tolist() == [1 - 2j] * 3


@ranks(1)
def test_layers_with_complex_parameters_may_be_added() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    (ddp(torch.ones(2)) * ddp.module.phase).sum().abs().backward()
    assert ddp.module.phase.grad is not None
    ddp.module.chalf = nn.Parameter(torch.zeros(2, dtype=torch.complex32))
    with pytest.raises(NotImplementedError, match=r"'chalf'.*complex32"):
        ddp(torch.ones(2))


@ranks(2, views=True)
def test_weighted_and_on_request(view: bool) -> None:
    model = Complex()
    alone = one_per_rank(model)
    ddp = wrap(model, view)
    for reduction in ("mean", "sum"):
        for net in (*alone, ddp):
            net.zero_grad()

        def step(net: Any, rank: int, reduction: str = reduction) -> None:
            for number, local in enumerate((True, True, False)):
                seed(rank, number)
                net.require_backward_grad_sync = not local
                with net.weighted(1 + 2 * rank + number, reduction):
                    net(Complex.batch(), sometimes=rank == 1).backward()

        step(ddp, dist.get_rank())
        for rank, net in enumerate(alone):
            step(net, rank)
        assert_mean(ddp, alone, reduction)
    params = [param for param in ddp.module.parameters() if param is not ddp.module.never]
    loss = ddp.module(Complex.batch())
    means = ddp.reduce_gradients(torch.autograd.grad(loss, params), params)
    assert_same_on_all_ranks(list(means))
    assert means[1].dtype == torch.complex128
