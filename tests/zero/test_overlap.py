"""``overlap_param_gather``: who uses a parameter waits for its value."""

import copy
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside_replicated import TRANSPORTS, Pair
from distributed import ranks
from modules import mlp
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.overrides import _get_current_function_mode_stack as modes_of_thread
from training import drawn, squares

from tritonddp.zero.values import OwnedValues

WIDTHS = 4, 8, 8, 2


class Plain(torch.optim.AdamW):
    """Takes the option, as the sharded one does."""

    def __init__(self, params: Any, overlap_param_gather: bool = False, **options: Any) -> None:
        super().__init__(params, **options)


def overlapping(module: nn.Module, **options: Any) -> Pair:
    counters["frames"].clear()  # earlier tests of this process may have compiled
    wrapper = {**TRANSPORTS["process group"], **options.pop("wrapper", {})}
    options.setdefault("optimizer_class", Plain)
    return Pair(module, wrapper=wrapper, overlap_param_gather=True, **options)


def train(pair: Pair, number: int, check: bool = False) -> None:
    """A step of both; nothing reads parameters but the forward and the optimizer."""
    for net, optimizer in pair.each():
        squares(net(drawn(5, 4, step=number))).backward()
        optimizer.step()
        optimizer.zero_grad()
    if check:
        pair.check()


@ranks(2, 3)
@pytest.mark.parametrize("views", [False, True])
def test_values_are_those_without_it(rank: int, views: bool) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dist.get_world_size() > 2 else None
    pair = overlapping(
        mlp(*WIDTHS),
        wrapper={"gradient_as_bucket_view": views},
        tolerance=tolerance,
    )
    for number in range(6):
        train(pair, number)
        assert not pair.optimizer.is_whole
    with pair.zero.no_sync(), pair.plain.no_sync():
        for net, _ in pair.each():
            squares(net(drawn(5, 4, step=7))).backward()
    train(pair, 8, check=True)
    assert pair.optimizer.is_whole
    pair.optimizer.synchronize()
    assert not modes_of_thread()


@ranks(2)
def test_a_forward_begins_before_all_values_are_there(rank: int) -> None:
    pair = overlapping(nn.Sequential(*(nn.Linear(600, 600) for _ in range(6))))
    seen: list[bool] = []
    for number in range(3):
        squares(pair.zero(drawn(2, 600, step=number))).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    layers = pair.zero.module
    for layer in (layers[0], layers[-1]):
        layer.register_forward_hook(lambda *_: seen.append(pair.optimizer.is_whole))
    pair.zero(drawn(2, 600))
    assert seen == [False, True]
    pair.optimizer.synchronize()


def read_by_address(net: Any) -> Tensor:
    """As an extension in C++ does: torch does not see it."""
    layer = net.module[0]
    seen: list[Tensor] = []
    address, size = ADDRESSES[id(layer)]

    def forward(x: Tensor) -> Tensor:
        seen.append(torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.float))
        return x

    with mock.patch.object(layer, "forward", forward):
        layer(torch.ones(1))
    return seen[0]


ADDRESSES: dict[int, tuple[int, int]] = {}

READERS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda net: net.state_dict(),
    "state_dict of the module": lambda net: net.module.state_dict(),
    "load_state_dict": lambda net: net.module.load_state_dict(
        {name: torch.full_like(p, 3) for name, p in net.module.named_parameters()}
    ),
    "deepcopy": lambda net: list(copy.deepcopy(net.module).parameters()),
    "data": lambda net: [p.data for p in net.parameters()],
    "clone": lambda net: [p.clone() for p in net.parameters()],
    "list": lambda net: torch.nn.utils.parameters_to_vector(net.parameters()),
    "foreach": lambda net: torch._foreach_norm(list(net.parameters())),
    "average": lambda net: list(torch.optim.swa_utils.AveragedModel(net.module).parameters()),
    "numpy": lambda net: [p.detach().numpy().tolist() for p in net.parameters()],
    "write": lambda net: [p.detach().mul_(2) for p in net.parameters()],
    "forward without gradients": lambda net: torch.no_grad()(net.module)(drawn(3, 4)),
    "in C++": read_by_address,
    "another thread": lambda net: in_thread(lambda: net(drawn(3, 4))),
}


def in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def late_begin(original: Any) -> Any:
    def begin(self: Any, where: str) -> None:
        time.sleep(0.1 * dist.get_rank())
        original(self, where)

    return begin


@ranks(2)
def test_whoever_reads_a_parameter_gets_its_new_value(rank: int) -> None:
    pair = overlapping(mlp(*WIDTHS))
    for net, _ in pair.each():
        layer = net.module[0]
        ADDRESSES[id(layer)] = layer.weight.data_ptr(), layer.weight.nbytes
    with mock.patch.object(OwnedValues, "begin", late_begin(OwnedValues.begin)):
        for number, (name, read) in enumerate(READERS.items()):
            train(pair, number)
            assert not pair.optimizer.is_whole, name
            found, expected = read(pair.zero), read(pair.plain)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
            pair.check(name)
            pair.optimizer.synchronize()


@ranks(2)
def test_what_does_not_need_values_does_not_wait(rank: int) -> None:
    pair = overlapping(mlp(*WIDTHS))
    train(pair, 0)
    for param in pair.zero.parameters():
        assert (param.grad, param.requires_grad, param.is_leaf) == (None, True, True)
        assert (param.shape, param.device.type) == (param.size(), "cpu")
        param.grad = torch.zeros(param.shape)
    pair.optimizer.zero_grad()
    list(pair.zero.named_parameters())
    assert not pair.optimizer.is_whole
    pair.check()
    pair.optimizer.synchronize()


@ranks(2)
def test_modes_of_others_may_begin_and_end_meanwhile(rank: int) -> None:
    pair = overlapping(mlp(*WIDTHS))
    outer, inner = torch.device("meta"), torch.device("cpu")
    with outer:
        with inner:
            train(pair, 0)
        assert len(modes_of_thread()) == 2
        assert torch.empty(1).is_meta
        with inner:
            pair.optimizer.synchronize()
            assert not torch.empty(1).is_meta
        assert torch.empty(1).is_meta
    assert not modes_of_thread()
    pair.check()


@ranks(2)
def test_the_default_device_may_change_meanwhile(rank: int) -> None:
    pair = overlapping(mlp(*WIDTHS))
    torch.set_default_device("cpu")
    train(pair, 0)
    assert not pair.optimizer.is_whole
    torch.set_default_device(None)
    assert len(modes_of_thread()) == 1
    torch.set_default_device("cpu")
    pair.check()
    pair.optimizer.synchronize()
    torch.set_default_device(None)
    assert not modes_of_thread()


@ranks(2)
def test_an_interrupted_wait_is_repeated(rank: int) -> None:
    pair = overlapping(mlp(*WIDTHS))
    train(pair, 0)
    with (
        mock.patch.object(OwnedValues, "wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        pair.optimizer.synchronize()
    assert not pair.optimizer.is_whole
    pair.check()
    pair.optimizer.synchronize()
    assert pair.optimizer.is_whole
    assert not modes_of_thread()


@ranks(2)
def test_compiled_code_finds_all_values(rank: int) -> None:
    pair = overlapping(mlp(*WIDTHS))
    train(pair, 0)
    assert not pair.optimizer.is_whole
    # Compiled while values are under way, then used again without.
    compiled = torch.compile(lambda x, w, b: x @ w.t() + b, backend="eager")
    results: list[Tensor] = []
    for net, _ in pair.each():
        x = drawn(3, 4)
        layer = net.module[0]
        result = compiled(x, layer.weight, layer.bias)
        torch.testing.assert_close(result, x @ layer.weight.t() + layer.bias, rtol=0, atol=0)
        results.append(result)
    torch.testing.assert_close(*results, rtol=0, atol=0)
    for number in range(2):
        train(pair, number)
        assert pair.optimizer.is_whole
        assert not modes_of_thread()
    pair.check()


@ranks(2)
def test_values_that_go_through_memory_are_there_after_the_step(rank: int) -> None:
    pair = Pair(mlp(*WIDTHS), Plain, overlap_param_gather=True)
    for number in range(4):
        train(pair, number)
    assert pair.optimizer.is_whole
    pair.check()


class Failing(Plain):
    """A step that fails, if it is to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("on purpose")
        return super().step(closure)


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2)
def test_a_step_that_fails_is_told_by_a_flag(rank: int, transport: str) -> None:
    pair = Pair(mlp(*WIDTHS), Failing, wrapper=TRANSPORTS[transport])
    for number in range(3):
        train(pair, number, check=True)
    assert pair.optimizer.is_whole
    squares(pair.zero(drawn(5, 4))).backward()
    pair.optimizer.optim.fails = True  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError):
        pair.optimizer.step()
    assert not pair.optimizer.is_whole
    pair.optimizer.optim.fails = False  # type: ignore[attr-defined]
    pair.optimizer.step()
    assert pair.optimizer.is_whole
