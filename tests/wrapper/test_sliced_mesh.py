"""A mesh that is one dimension of a larger one: tensor parallelism inside data parallelism."""

from typing import Any

import torch
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel


def train(cls: Any, mesh: Any) -> list[Tensor]:
    """More steps than it takes until what the module does not hold leaves its bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 4))
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    ddp = cls(model, device_mesh=mesh["dp"])
    params = list(ddp.parameters())  # the module holds none from the first forward on
    optimizer = torch.optim.SGD(params, lr=0.1)
    grads = []
    for step in range(10):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        ddp(torch.randn(3, 4)).square().sum().backward()
        grads += [param.grad.clone() for param in params]
        optimizer.step()
        optimizer.zero_grad()
    return grads


@ranks(4)
def test_the_gradients_of_stock(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = train(Stock, mesh)
    assert_same_bits(train(DistributedDataParallel, mesh), expected, f"gradient on rank {rank}")
