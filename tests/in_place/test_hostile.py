"""Programs that know nothing of ``replicate``, and that a module in place has to be right for."""

import copy
import gc
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset
from training import drawn, gradients, train_step

from tritonddp import DistributedDataParallel, ddp, replicate
from tritonddp.in_place import ReplicatedModule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


# Copies that a class makes itself


class CopiesItsDictionary(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class CopiesItsAttributes(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        nn.Module.__init__(made)
        for name, value in self.__dict__.items():
            setattr(made, name, copy.deepcopy(value, memo))
        return made


class NestsItsState(Net):
    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": self.__dict__.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"])


OWN_COPIES: dict[str, Callable[[], nn.Module]] = {
    "dictionary": CopiesItsDictionary,
    "attributes": CopiesItsAttributes,
    "nested state": NestsItsState,
    "parametrized": lambda: weight_norm(Net().layer),
    "graph module": lambda: torch.fx.symbolic_trace(Net()),
}


@pytest.mark.parametrize("kind", OWN_COPIES)
@ranks(2)
def test_a_copy_by_the_class_itself_is_a_plain_module(kind: str, rank: int) -> None:
    net = replicate(OWN_COPIES[kind]())
    train_step(net, drawn(5, 4))
    copies = [copy.deepcopy(net)]
    if kind != "parametrized":  # which torch refuses to pickle
        copies.append(pickle.loads(pickle.dumps(net)))
    for made in copies:
        assert not isinstance(made, ReplicatedModule)
        assert list(made.state_dict()) == list(net.state_dict())
        if rank == 0:  # one rank alone trains it
            train_step(made, drawn(5, 4))
    train_step(net, drawn(5, 4, step=1))
    assert_same_on_all_ranks(gradients(net))
    train_step(replicate(copies[-1]), drawn(5, 4, step=2))
    assert_same_on_all_ranks(gradients(copies[-1]))


@ranks(2)
def test_a_graph_module_may_be_compiled_again(rank: int) -> None:
    net = replicate(torch.fx.symbolic_trace(Net()))
    train_step(net, drawn(5, 4))
    net.graph.lint()
    net.recompile()
    train_step(net, drawn(5, 4, step=1))
    assert_same_on_all_ranks(gradients(net))


# Buffers


class Scaled(Net):
    """Its backward needs the buffer, which each rank changes by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.abs().mean(0))  # type: ignore[operator]
        return super().forward(x * self.scale) * self.scale


@ranks(2)
def test_the_next_forward_has_the_buffers_of_rank_0_if_all_graphs_are_retained(rank: int) -> None:
    net, wrapped = replicate(Scaled()), DistributedDataParallel(Scaled())
    for number in range(4):
        for each in (net, wrapped):
            each.zero_grad()
            each(drawn(5, 4, step=number)).square().sum().backward(retain_graph=True)
        assert_same_bits(gradients(net), gradients(wrapped))
        assert_same_bits(list(net.buffers()), list(wrapped.buffers()))
    saved = {name: value.clone() * 3 for name, value in net.state_dict().items()}
    net.load_state_dict(saved)
    with torch.no_grad():
        net(torch.zeros(1, 4))
    torch.testing.assert_close(net.scale, saved["scale"] / 2)


def sends_later(state: None, buffers: dict[str, Tensor]) -> list[torch.futures.Future[None]]:
    """A hook for buffers that writes when the backward may be over."""
    future: torch.futures.Future[None] = torch.futures.Future()

    def send() -> None:
        buffers["scale"].data.fill_(7)
        future.set_result(None)

    threading.Timer(0.05, send).start()
    return [future]


@pytest.mark.parametrize("way", ["broadcast", "new group", "hook"])
@ranks(2)
def test_a_retained_graph_has_its_buffers_in_all_its_backwards(way: str) -> None:
    net = replicate(Scaled())
    if way == "hook":
        ddp(net)._register_buffer_comm_hook(None, sends_later)
    loss = net(drawn(5, 4)).square().sum()
    own, steps = [net.scale.clone()], []
    for _ in range(3):
        net.zero_grad()
        loss.backward(retain_graph=True)
        steps.append(gradients(net))
        assert_same_bits([net.scale], own)
        assert_same_bits(steps[-1], steps[0])
    if way == "new group":
        ddp(net)._update_process_group(dist.new_group())
    with torch.no_grad():
        net(torch.zeros(1, 4))
    assert_same_on_all_ranks([net.scale])
    assert (net.scale[0].item() == 3.5) is (way == "hook")


# Processes that get the model


class Features(Dataset[Tensor]):
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Tensor:
        output = self.net(torch.full((1, 4), float(number)))
        return torch.autograd.grad(output.sum(), self.net.layer.bias)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@ranks(2)
def test_a_worker_of_a_data_loader_may_run_it(method: str, rank: int) -> None:
    net = replicate(Net())
    train_step(net, drawn(5, 4))
    loader = DataLoader(Features(net), 2, num_workers=1, multiprocessing_context=method)
    assert [batch.tolist() for batch in loader] == [[[1.0] * 4] * 2] * 2
    train_step(net, drawn(5, 4, step=1))
    assert_same_on_all_ranks(gradients(net))


# Parts that come later


@ranks(2)
def test_a_module_in_place_has_all_methods_that_it_promises(rank: int) -> None:
    net: Any = replicate(Net())
    promised = re.findall(
        r"``(\w+)``", str(replicate.__doc__).split("these methods:")[1].split(".")[0]
    )
    assert len(promised) == 15
    assert all(callable(getattr(net, name)) for name in promised)
    if rank == 1:
        net.request_stop()
    assert not net.should_stop()
    train_step(net, drawn(5, 4))
    assert net.should_stop()


class Registered(Net):
    def __init_subclass__(cls, *, name: str) -> None:
        super().__init_subclass__()


class Entry(Registered, name="entry"):
    """Subclasses need an argument."""


@ranks(2)
def test_a_class_that_takes_no_subclass_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"class of Entry cannot be changed .*'name'.*: wrap the"):
        replicate(Entry())


@ranks(2)
def test_what_is_not_used_any_more_is_no_obstacle(rank: int) -> None:
    gc.disable()
    try:
        net = replicate(nn.Sequential(Net(), nn.Linear(4, 2)))
        head: nn.Module = net[1]
        del net
        train_step(replicate(head), drawn(5, 4))
    finally:
        gc.enable()
    assert_same_on_all_ranks(gradients(head))


@ranks(2)
def test_a_part_that_is_added_is_averaged_when_nothing_else_is_used(rank: int) -> None:
    net: Any = replicate(Net())
    train_step(net, drawn(5, 4))
    for step in range(3):
        torch.manual_seed(step)
        net.head = nn.Sequential()  # replaced, the second time
        net.head.append(nn.Linear(4, 2))
        net.gain = nn.Parameter(torch.ones(2))
        for number in range(3):
            net.zero_grad()
            features = net(drawn(5, 4, step=number)).detach() if step == 1 else drawn(5, 4)
            (net.head(features) * net.gain).square().sum().backward()
            assert net.gain.grad is not None
            assert_same_on_all_ranks(gradients(net))
