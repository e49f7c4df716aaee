"""Arguments of public calls, and modules to wrap: valid, almost valid, absurd."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 4


class Falls:
    """An object without a truth value, a length or a comparison."""

    def _fall(self, *_: object) -> Any:
        raise TypeError("Falls does not support this")

    __bool__ = __len__ = __eq__ = _fall  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def tensors() -> st.SearchStrategy[Tensor]:
    """Of all dtypes, layouts and some devices."""
    shapes = [(), (1,), (3,), (0,), (4, 3), (3, 4), (2, 0, 3)]
    real = [torch.float32, torch.float64, torch.float16, torch.int64]
    makers: list[Callable[[Tensor], Tensor]] = [
        lambda ones: ones,
        torch.zeros_like,
        lambda ones: ones.to("meta"),
        lambda ones: ones.to_sparse(),
        lambda ones: (ones.float() * math.nan).to(ones.dtype),
    ]
    ones = st.builds(
        lambda shape, dtype: torch.ones(shape, dtype=dtype),
        st.sampled_from(shapes),
        st.sampled_from([*real, torch.bool, torch.complex64]),
    )
    return st.builds(lambda make, ones: make(ones), st.sampled_from(makers), ones)


def numbers() -> st.SearchStrategy[Any]:
    others: list[Any] = [0.5, -0.5, -0.0, 1e-300, 1e300, math.inf, -math.inf, math.nan, 1j, True]
    return st.sampled_from([0, 1, -1, 2, 2**31, 2**70, -(2**70), 10**400, *others])


def absurd() -> st.SearchStrategy[Any]:
    """Mostly invalid values."""
    return st.one_of(
        st.none(),
        numbers(),
        st.sampled_from(["", "int8", "mean", "weight", "*", "é\0", b"", b"x"]),
        st.sampled_from([torch.float16, torch.int8, torch.device("meta"), torch.strided]),
        st.sampled_from([int, nn.Linear, len, nn.Module]),
        st.builds(lambda: [None]),
        st.builds(lambda: {"a": 1, 2: "b"}),
        st.builds(lambda: (each for each in range(3))),
        st.builds(object),
        st.builds(Falls),
        st.builds(lambda: nn.Linear(3, 3)),
        st.builds(lambda: nn.Parameter(torch.ones(2))),
        st.builds(lambda: lambda *_: None),
        tensors(),
    )


def flags() -> st.SearchStrategy[Any]:
    return st.one_of(st.booleans(), st.booleans(), st.none(), absurd())


# Modules


class Net(nn.Module):
    """Two layers and a buffer; it also returns its other arguments."""

    def __init__(self, dtype: torch.dtype = torch.float64, **more: Tensor) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.register_buffer("seen", torch.zeros(2))
        for name, tensor in more.items():
            is_trained = tensor.is_floating_point()
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=is_trained))

    def forward(self, x: Tensor, *also: Any, **named: Any) -> Any:
        out = self.head(torch.tanh(self.body(x)))
        return (out, also, named) if also or named else out


def batch() -> Tensor:
    return torch.arange(3 * WIDTH, dtype=torch.float32).view(3, WIDTH).sin().double()


def _changed(change: Callable[[Net], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        change(net)
        return net

    return make


def _compute(net: Net) -> None:
    """Replace a parameter by a computed tensor."""
    del net.head.weight
    net.head.weight = torch.ones(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) * 2


def _ignoring(names: Any) -> Callable[[], nn.Module]:
    return _changed(lambda net: setattr(net, "_ddp_params_and_buffers_to_ignore", names))


def modules() -> st.SearchStrategy[nn.Module]:
    """Valid modules, and modules that cannot be wrapped."""
    ignored: list[Any] = [["body.weight"], 3, [None, 3]]
    makers: list[Callable[[], nn.Module]] = [
        *[Net] * 3,
        lambda: Net(torch.bfloat16),
        lambda: Net(torch.complex64),
        *map(_ignoring, ignored),
        lambda: Net().to("meta"),
        _changed(lambda net: net.head.to("meta")),
        lambda: Net().requires_grad_(False),
        lambda: Net(number=torch.ones(2, dtype=torch.int64)),
        lambda: Net(eighth=torch.ones(2).to(torch.float8_e4m3fn)),
        lambda: Net(nothing=torch.empty(0, 3)),
        _changed(_compute),
        nn.Module,
        lambda: nn.LazyLinear(3),
        lambda: nn.Embedding(5, 3, sparse=True),
    ]
    return st.sampled_from(makers).map(lambda make: make())
