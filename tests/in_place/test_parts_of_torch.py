"""A module that is replicated in place, with other parts of torch."""

import copy
from functools import partial

import pytest
import torch
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks
from test_replicate import Encoder, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import descend, drawn, gradients, squares, train_step

from tritonddp import DistributedDataParallel, ddp, replicate


@pytest.mark.long
@pytest.mark.parametrize("is_first", [False, True])
@ranks(2)
def test_compiled_models_are_averaged(is_first: bool) -> None:
    torch._dynamo.reset()
    net, plain = seeded(nn.BatchNorm1d), DistributedDataParallel(seeded(nn.BatchNorm1d))
    compiled = partial(torch.compile, fullgraph=True)
    call = replicate(compiled(net)) if is_first else compiled(replicate(net))
    for number in range(4):
        x = drawn(5, 4, step=number)
        net.zero_grad()
        squares(call(x)).backward()
        train_step(plain, x)
        torch.testing.assert_close(gradients(net), gradients(plain))
        assert_same_on_all_ranks(gradients(net))
        descend(net)
        descend(plain)
    if not is_first:
        assert ddp(call) is ddp(net)
        assert call.no_sync.__self__ is net
        assert next(iter(call.state_dict())).startswith("_orig_mod.encoder")


@ranks(4)
def test_a_sliced_module_keeps_its_parameters_and_its_checkpoints() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Encoder(lambda _: nn.Identity())  # type: ignore[arg-type]
    parallelize_module(net, mesh["tp"], {"encoder.0": ColwiseParallel(), "head": RowwiseParallel()})
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    replicate(net, device_mesh=mesh["dp"])
    names = [name for name, _ in net.named_parameters()]
    keys = list(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(3):
        torch.manual_seed(10 * number + mesh["dp"].get_local_rank())
        optimizer.zero_grad()
        squares(net(torch.randn(3, 4))).backward()
        optimizer.step()
        assert [name for name, _ in net.named_parameters()] == names
    assert all(type(each) is nn.Parameter for each in net.parameters())
    state = net.state_dict()
    assert list(state) == keys
    assert all(isinstance(each, DTensor) for each in state.values())
    assert_same_on_all_ranks([each.full_tensor() for each in state.values()])
    saved = copy.deepcopy(state)
    optimizer.step()
    net.load_state_dict(saved)
    for name, each in net.state_dict().items():
        assert_same_bits(each.to_local(), saved[name].to_local(), name)
    with pytest.raises(RuntimeError, match="create the optimizer after replicating"):
        early.step()
