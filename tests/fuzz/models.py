"""What is wrapped, and a step of training with it that tells whether gradients are right."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fuzz.contract import only_documented

WIDTH = 4


class Net(nn.Module):
    """Two layers and a buffer; what it returns besides is up to ``also``."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor, *also: Any, **named: Any) -> Any:
        out = self.head(torch.tanh(self.body(x)))
        return (out, also, named) if also or named else out


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.arange(3 * WIDTH, dtype=torch.float32).view(3, WIDTH).sin().to(dtype)


def _frozen() -> nn.Module:
    return Net().requires_grad_(False)


def _integer() -> nn.Module:
    net = Net()
    net.register_parameter("number", nn.Parameter(torch.ones(2, dtype=torch.int64), False))
    return net


def _eighth() -> nn.Module:
    net = Net()
    eighth = torch.ones(2).to(torch.float8_e4m3fn)
    net.register_parameter("eighth", nn.Parameter(eighth))
    return net


def _empty_parameter() -> nn.Module:
    net = Net()
    net.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    return net


def _computed() -> nn.Module:
    """A parameter that was replaced by something computed."""
    net = Net()
    del net.head.weight
    net.head.weight = torch.ones(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) * 2
    return net


def _ignores(names: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        net._ddp_params_and_buffers_to_ignore = names
        return net

    return make


def _half_meta() -> nn.Module:
    net = Net()
    net.head.to("meta")
    return net


def modules() -> st.SearchStrategy[nn.Module]:
    """Valid modules, and some that cannot be wrapped."""
    makers: list[Callable[[], nn.Module]] = [
        Net,
        Net,
        Net,
        lambda: Net(torch.float32),
        lambda: Net(torch.bfloat16),
        lambda: Net(torch.complex64),
        lambda: Net().to("meta"),
        _half_meta,
        _frozen,
        _integer,
        _eighth,
        _empty_parameter,
        _computed,
        _ignores(["body.weight"]),
        _ignores(["nothing"]),
        _ignores(3),
        _ignores([None, 3]),
        nn.Module,
        lambda: nn.LazyLinear(3),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)),
        lambda: nn.Embedding(5, 3, sparse=True),
    ]
    return st.sampled_from(makers).map(lambda make: make())


def assert_right(ddp: Any) -> None:
    """The next correct step gives the gradients of an unwrapped module. (There is one rank.)

    Args:
        ddp: wraps a module in fp64. What waits for ``finalize_backward()`` is finalised first.
    """
    if ddp.require_manual_backward_finalization:
        with only_documented(type(ddp).finalize_backward):
            ddp.finalize_backward()
        ddp.require_manual_backward_finalization = False
    alone = copy.deepcopy(ddp.module)
    for net in (ddp, alone):
        net.zero_grad(set_to_none=True)
        net(batch()).square().sum().backward()
    for (name, param), own in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, own.grad, msg=lambda text, n=name: f"{n}: {text}")
    there = [param.grad for param in ddp.module.parameters() if param.grad is not None]
    norm = torch.nn.utils.get_total_norm(there)
    torch.testing.assert_close(ddp.grad_norm().to(norm.dtype), norm)
