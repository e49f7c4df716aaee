"""``replicate(module)``: any use of the module is synchronized."""

import copy
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from modules import by_pickle
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule, symbolic_trace
from torch.utils.checkpoint import checkpoint
from training import assert_mean_of, descend, drawn, fail, gradients, raises_if, squares, train_step

from tritonddp import DistributedDataParallel, ddp, replicate
from tritonddp.features.call_sites import CallSites
from tritonddp.in_place import ReplicatedModule
from tritonddp.reducer.graph.backward import SyncState


class Encoder(nn.Module):
    """A model with a method in addition to ``forward``."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), norm(8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def seeded(norm: type[nn.Module] = nn.LayerNorm) -> Encoder:
    torch.manual_seed(0)
    return Encoder(norm)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "forward": lambda net, x: squares(net(x)),
    "method": lambda net, x: squares(net.encode(x)),
    "submodule": lambda net, x: squares(net.encoder(x)),
    "parameter": lambda net, x: squares(net.head.weight) * x.sum(),
    "forward and submodule": lambda net, x: squares(net(x)) + squares(net.encoder[0](x)),
    "checkpoint": lambda net, x: squares(net.head(checkpoint(net.encoder, x, use_reentrant=False))),
}


@ranks(2, 3)
def test_every_call_of_it_is_averaged() -> None:
    net, plain = replicate(seeded()), seeded()
    for number in range(3):  # buckets are rebuilt after the first
        for name, call in WAYS.items():
            for each in (net, plain):
                each.zero_grad()
                call(each, drawn(5, 4, step=number)).backward()
            assert_mean_of(net, plain, name)


@ranks(2)
def test_a_penalty_with_a_forward_inside_no_sync_is_refused(rank: int) -> None:
    """Otherwise the order of gradients would decide whether a rank averages it."""
    net = replicate(seeded())
    net.encoder.scale = nn.Parameter(torch.ones(3))  # unused
    x = drawn(5, 4)
    squares(net(x)).backward()
    with net.no_sync():
        loss = squares(net(x))
    if rank == 1:
        with pytest.raises(RuntimeError, match=rf"rank {rank}, step 2.*both.*inside no_sync\(\)"):
            (loss + squares(net.encoder.scale)).backward()
    else:
        loss.backward()
    for _ in range(2 if rank == 0 else 1):  # the failed backward of rank 1 was a reduction
        net.zero_grad()
        squares(net(x)).backward()
    assert_same_on_all_ranks(gradients(net))
    assert all(grad is None or grad.isfinite().all() for grad in gradients(net))


@ranks(2)
def test_names_and_types_of_the_module_stay_the_same(rank: int) -> None:
    net = seeded()
    net.reducer, net.device = nn.Tanh(), "its own"  # type: ignore[assignment]
    before = list(net.state_dict()), [name for name, _ in net.named_modules()], repr(net)
    params = list(net.parameters())
    made = replicate(net)
    assert made is net
    assert (list(net.state_dict()), [name for name, _ in net.named_modules()], repr(net)) == before
    assert [id(each) for each in params] == [id(each) for each in net.parameters()]
    assert isinstance(net, Encoder)
    assert type(net).__name__ == "Encoder"
    assert (net.reducer, net.device) == (net._modules["reducer"], "its own")
    other = replicate(seeded())
    assert type(other) is type(net)
    assert other.reducer is ddp(other).reducer  # for scripts that read it
    own = {
        "__getattr__": lambda net, name: nn.Module.__getattr__(net, name.replace("device", "head"))
    }
    handing: Any = replicate(type("Handing", (Encoder,), own)())  # like PEFT's classes
    assert handing.device is handing.head
    assert not hasattr(other, "module")  # scripts use it to unwrap a model
    assert not hasattr(copy.deepcopy(other), "reducer")
    assert ddp(net).module is net
    assert ddp(ddp(net)) is ddp(net)
    assert net.encode.__func__ is Encoder.encode


# Backwards of one rank


@ranks(2, 3)
def test_a_backward_of_one_rank_alone_is_an_error_on_all_and_averages_nothing(rank: int) -> None:
    net = replicate(seeded())
    for number in range(3):
        train_step(net, drawn(5, 4, step=number))
        descend(net)

    def probe_on_rank_0() -> None:
        if rank == 0:
            squares(net(drawn(2, 4))).backward()
        train_step(net, drawn(5, 4, step=9))

    with pytest.raises(RuntimeError, match=r"step 4.*\n.*option 'backward\(\)'") as error:
        probe_on_rank_0()
    text = str(error.value)
    assert re.search(r"rank 0 has 'called in .*probe_on_rank_0 \(test_replicate.py:", text)
    assert "has 'called in train_step (training.py:" in text
    assert "inside no_sync(), or use torch.autograd.grad" in text
    train_step(net, drawn(5, 4, step=4))  # training can go on
    assert_same_on_all_ranks(gradients(net))


@ranks(2)
def test_a_backward_that_fails_on_one_rank_leaves_the_ranks_in_step(rank: int) -> None:
    net = replicate(seeded(nn.BatchNorm1d))
    train_step(net, drawn(5, 4))
    loss = squares(net(drawn(5, 4, step=1)))
    handle = net.encoder[0].weight.register_hook(lambda grad: grad / 0 if rank == 0 else 1 / 0)
    with raises_if(rank == 1, ZeroDivisionError):
        loss.backward()
    handle.remove()
    for number in range(2, 5):
        train_step(net, drawn(5, 4, step=number))
        assert_same_on_all_ranks([*gradients(net), *net.buffers()])


# Changes of the module


@ranks(2)
def test_a_part_that_is_added_is_averaged_when_nothing_else_is_used(rank: int) -> None:
    net: Any = replicate(nn.Linear(4, 4))
    train_step(net, drawn(5, 4))
    for step in range(2):
        torch.manual_seed(step)
        net.head = nn.Sequential()  # replaced, the second time
        net.head.append(nn.Linear(4, 2))
        net.gain = nn.Parameter(torch.ones(2))
        for number in range(2):
            net.zero_grad()
            squares(net.head(drawn(5, 4, step=number)) * net.gain).backward()
            assert net.gain.grad is not None
            assert_same_on_all_ranks(gradients(net))


@ranks(2)
def test_synchronization_is_switched_by_the_names_of_fsdp2(rank: int) -> None:
    net = replicate(seeded())
    net.set_requires_gradient_sync(False)
    squares(net.encode(drawn(5, 4))).backward()
    first, other = gather(net.encoder[0].weight.grad)
    assert not torch.equal(first, other)
    assert net.require_backward_grad_sync is False
    net.require_backward_grad_sync = True  # as nanoGPT's script sets it
    squares(net.encode(drawn(5, 4, step=1))).backward()
    assert_same_on_all_ranks(gradients(net))
    with pytest.raises(TypeError, match="requires_gradient_sync"):
        net.set_requires_gradient_sync("no")  # type: ignore[arg-type]


class Scaled(nn.Module):
    """Its backward needs the buffer, which each rank changes in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.abs().mean(0))  # type: ignore[operator]
        return self.layer(x * self.scale) * self.scale


@ranks(2)
def test_a_retained_graph_has_its_buffers_in_all_its_backwards() -> None:
    net = replicate(Scaled())
    loss = squares(net(drawn(5, 4)))
    own, steps = net.scale.clone(), []
    for _ in range(3):
        net.zero_grad()
        loss.backward(retain_graph=True)
        steps.append(gradients(net))
        assert_same_bits(net.scale, own)
        assert_same_bits(steps[-1], steps[0])
    with torch.no_grad():
        net(torch.zeros(1, 4))
    assert_same_on_all_ranks([net.scale])


@ranks(2)
def test_after_another_process_group_calls_of_other_methods_are_averaged() -> None:
    net = replicate(seeded())
    ddp(net)._update_process_group(dist.new_group())
    for number in range(2):
        net.zero_grad()
        squares(net.head(net.encode(drawn(5, 4, step=number)))).backward()
        assert_same_on_all_ranks(gradients(net))


@ranks(2)
def test_a_module_in_place_has_all_methods_that_it_promises(rank: int) -> None:
    net: Any = replicate(seeded())
    methods = str(replicate.__doc__).split("these methods:")[1].split(".")[0]
    promised = re.findall(r"``(\w+)``", methods)
    assert len(promised) == 15
    assert all(callable(getattr(net, name)) for name in promised)
    if rank == 1:
        net.request_stop()
    assert not net.should_stop()
    train_step(net, drawn(5, 4))
    assert net.should_stop()


# Copies


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("kind", [Encoder, symbolic_trace])
@ranks(2)
def test_a_copy_is_a_plain_module(kind: Any, copied: Any, rank: int) -> None:
    net = replicate(kind(Encoder()) if kind is symbolic_trace else kind())
    names = list(net.state_dict())
    train_step(net, drawn(5, 4))
    if isinstance(net, GraphModule):
        net.recompile()
    made = copied(net)
    assert not isinstance(made, ReplicatedModule)
    assert list(made.state_dict()) == names
    assert_same_bits(list(made.parameters()), list(net.parameters()))
    if rank == 0:  # only one rank trains the copy
        train_step(made, drawn(5, 4))
    again = replicate(made)
    train_step(again, drawn(5, 4, step=1))
    assert_same_on_all_ranks(gradients(again))
    train_step(net, drawn(5, 4, step=2))
    assert_same_on_all_ranks(gradients(net))


@ranks(2)
def test_it_is_freed_with_its_hooks() -> None:
    net = replicate(seeded())
    train_step(net, drawn(5, 4))
    params = [weakref.ref(each) for each in net.parameters()]
    state, kept = weakref.ref(ddp(net)._ddp_state), net.head
    del net
    gc.collect()
    assert state() is None
    assert sum(each() is not None for each in params) == 2
    squares(kept(drawn(2, 8))).backward()  # local


@ranks(2)
def test_a_forked_process_may_train_it_alone() -> None:
    """As a worker of a DataLoader does."""
    net = replicate(nn.Linear(4, 4))
    train_step(net, drawn(5, 4))
    child = os.fork()
    if not child:
        try:
            train_step(net, torch.ones(1, 4), loss=torch.sum)
            os._exit(net.bias.grad.tolist() != [1.0] * 4)  # type: ignore[union-attr]
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    train_step(net, drawn(5, 4, step=1))
    assert_same_on_all_ranks(gradients(net))


# Other parts of torch


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


# Modules that cannot be replicated


def encoder(**attributes: Any) -> Any:
    """An encoder whose class has these attributes."""
    return type("Mine", (Encoder,), attributes)()


@ranks(2)
def test_modules_that_cannot_be_replicated_are_named_and_not_changed() -> None:
    whole = replicate(nn.Sequential(seeded(), nn.Linear(3, 2)))
    wrapped = DistributedDataParallel(seeded())
    entry = encoder(__init_subclass__=lambda cls, *, name: None)  # its subclasses need an argument
    cases: list[tuple[Any, type[Exception], str]] = [
        (whole, ValueError, "it is replicated already"),
        (whole[0], ValueError, "it is a part of a Sequential that is replicated already"),
        (nn.ModuleList([whole]), ValueError, "its part '0' is replicated already"),
        (wrapped, TypeError, "this DistributedDataParallel is a wrapper"),
        (wrapped.module, ValueError, "it is wrapped already"),
        (torch.jit.script(nn.Linear(2, 2)), TypeError, "is a TorchScript module"),
        (encoder(metrics=None), ValueError, "Mine has attributes that .*: metrics"),
        (encoder(no_sync=property(fail)), ValueError, "Mine has attributes that .*: no_sync"),
        (entry, TypeError, r"class of Mine cannot be changed .*'name'.*: wrap the module"),
        ("net", TypeError, r"module must be a torch.nn.Module, got str"),
        (nn.Tanh(), RuntimeError, "doesn't have any parameter"),
    ]
    for module, kind, message in cases:
        before = type(module)
        with pytest.raises(kind, match=message):
            replicate(module)
        assert type(module) is before
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_size'"):
        replicate(seeded(), bucket_size=3)
    with pytest.raises(ValueError, match=r"use torch\.autocast"):
        replicate(seeded(), mixed_precision=object())
    with pytest.raises(ValueError, match="'0' is already replicated in place"):
        DistributedDataParallel(nn.ModuleList([whole]))
    for plain in seeded(), whole[:1]:
        with pytest.raises(TypeError, match=f"{type(plain).__name__} is not replicated"):
            ddp(plain)


# The line of a backward


def test_the_place_of_a_backward_is_found_from_a_thread_of_the_engine() -> None:
    """As on a GPU, where hooks run in threads of the autograd engine."""
    sites, found = CallSites(SyncState()), []

    def on_gradient(_: Tensor) -> None:
        thread = threading.Thread(target=lambda: found.append(sites.find()))
        thread.start()
        thread.join()

    x = torch.ones(2, requires_grad=True)
    x.register_hook(on_gradient)
    x.sum().backward()
    x.sum().backward()
    first, second = found
    assert "called in test_the_place" in first.name
    assert "test_replicate.py:" in first.name
    assert first.name != second.name
    assert first.hash != second.hash
    assert sites.find().name == "called on another thread"
