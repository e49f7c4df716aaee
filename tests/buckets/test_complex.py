"""Complex parameters: their gradients travel as real numbers and come back complex."""

import pytest
import torch
from distributed import ranks
from torch import nn

from tritonddp import DistributedDataParallel


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
