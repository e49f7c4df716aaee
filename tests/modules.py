"""Small modules for tests. A module that only one file needs is in that file."""

import io
import itertools
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

Shape = int | tuple[int, ...]


def linears(*widths: int, **options: Any) -> nn.Sequential:
    """Linear layers. ``widths`` includes the inputs and the outputs."""
    return nn.Sequential(*(nn.Linear(*each, **options) for each in itertools.pairwise(widths)))


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers, with an activation after each but the last."""
    layers = linears(*widths)
    return nn.Sequential(*[each for layer in layers for each in (layer, activation())][:-1])


def normed(inputs: int = 3, outputs: int = 4) -> nn.Sequential:
    """A layer and a batch norm, which has buffers."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs))


class Layers(nn.Module):
    """Layers of one width. A call uses the layers that it names, in this order.

    Args:
        names: the names of the layers, in the order of registration.
        order: the layers that a call uses by default; ``None`` for all.
    """

    def __init__(
        self,
        names: Iterable[str] = "abc",
        width: int = 4,
        order: Iterable[str] | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(width, width, bias=bias) for name in names})
        self.order = order

    def forward(self, x: Tensor, order: Iterable[str] | None = None) -> Tensor:
        order = self.order if order is None else order
        for name in self.layers if order is None else order:
            x = torch.tanh(self.layers[name](x))
        return x


class Two(nn.Module):
    """The second layer is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


class OnDemand(nn.Module):
    """Two layers, a third one between them if a call has ``extra``, and an unused one."""

    def __init__(self, inputs: int = 3, width: int = 40, outputs: int = 2) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(inputs, width), nn.Linear(width, width)
        self.unused, self.last = nn.Linear(2, 2), nn.Linear(width, outputs)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.extra(x).tanh() if extra else x)


class Squares(nn.Module):
    """Tensors of ones. The output is the sum of their squares, times ``factor``.

    So each gradient is twice the tensor, times ``factor``. A call can leave out some tensors.
    """

    def __init__(self, *shapes: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape in shapes)

    def forward(self, factor: Any = 1.0, without: Iterable[int] = ()) -> Tensor:
        without = set(without)
        used = [param for number, param in enumerate(self.params) if number not in without]
        # In reverse, so that gradients are ready in the order of the parameters.
        return sum(
            ((each.abs().square() * factor).sum() for each in reversed(used)), torch.zeros(())
        )


class Given(nn.Module):
    """Parameters whose gradients, if not ``None``, are the arguments of the forward."""

    def __init__(self, *shapes: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, *gradients: Tensor | None) -> Tensor:
        pairs = zip(self.params, gradients, strict=True)
        return torch.stack(
            [(param * each.conj()).sum() for param, each in pairs if each is not None]
        ).sum()


class TiedTable(nn.Module):
    """A table with sparse gradients, and a dense layer that shares its weight."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=True)
        self.out = nn.Linear(width, rows, bias=False)
        self.out.weight = self.table.weight

    def forward(self, indices: Tensor, is_dense: bool = True) -> Tensor:
        rows = self.table(indices)
        return (self.out(rows) if is_dense else rows).square().sum()


class Kinds(nn.Module):
    """Parameters of several dtypes, and a table with sparse gradients.

    The output is the sum of all, real and imaginary parts, each times its factor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.complex_ = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.double_ = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.half_ = nn.Parameter(torch.ones(5, dtype=torch.float16))
        self.single = nn.Parameter(torch.ones(5))

    def forward(self, indices: Tensor, factor: Any = 1.0, **factors: Any) -> Tensor:
        """``factor`` is the default of ``factors`` of parameters, of "real" and of "imag"."""
        terms = {
            "table": self.table(indices),
            "real": self.complex_.real,
            "imag": self.complex_.imag,
            "double_": self.double_,
            "half_": self.half_,
            "single": self.single,
        }
        return sum(
            (each * factors.get(name, factor)).sum().double() for name, each in terms.items()
        )


class Withheld(torch.autograd.Function):
    """Returns no gradient for its second argument, unless ``gives`` is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gives: bool) -> Tensor:
        ctx.gives, ctx.shape = gives, weight.shape
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.new_full(ctx.shape, grad.sum().item()) if ctx.gives else None, None


def by_pickle(module: nn.Module) -> Any:
    """Copy the module."""
    return pickle.loads(pickle.dumps(module))


def by_torch_save(module: nn.Module) -> Any:
    """Copy the module."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
