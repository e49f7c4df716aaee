"""A mesh that is one dimension of a larger one: tensor parallelism inside data parallelism."""

from typing import Any

import pytest
import torch
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel


def train(cls: Any, mesh: Any, by_hand: bool) -> list[Tensor]:
    """Train for enough steps that parameters outside of the module would leave their buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 4))
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    if by_hand:  # without ``device_mesh``, and no layer keeps its parameters
        parallelize_module(model, mesh["tp"], {"3": ColwiseParallel()})
        _pre_dp_module_transform(model)
    given = {"process_group": mesh["dp"].get_group()} if by_hand else {"device_mesh": mesh["dp"]}
    ddp = cls(model, **given)
    params = list(ddp.parameters())  # the module has none after the first forward
    optimizer = torch.optim.SGD(params, lr=0.1)
    grads = []
    for step in range(10):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        ddp(torch.randn(3, 4)).square().sum().backward()
        grads += [param.grad.clone() for param in params]
        optimizer.step()
        optimizer.zero_grad()
    return grads


@pytest.mark.parametrize("by_hand", [False, True])
@ranks(4)
def test_gradients_on_a_sliced_mesh_are_those_of_stock(rank: int, by_hand: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = train(Stock, mesh, by_hand)
    found = train(DistributedDataParallel, mesh, by_hand)
    assert_same_bits(found, expected, f"gradient on rank {rank}")
