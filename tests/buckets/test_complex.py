"""Complex parameters: their gradients travel as real numbers and come back complex."""

import pytest
import torch
from distributed import ranks
from torch import nn

from tritonddp import DistributedDataParallel
from tritonddp.kernels import dispatch
from tritonddp.kernels.flat_buffer import Layout


def test_the_tables_of_a_complex_buffer_are_those_of_its_real_parts() -> None:
    kernels = dispatch._for_complex(dispatch.in_triton())
    layout = Layout.of([(3,)], [(1,)], kernels.alignment, 0)
    flat = kernels.buffer(layout, torch.complex64, torch.device("cpu"))
    assert kernels.tables(flat) is flat.real.tables is flat.tables is not None


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
