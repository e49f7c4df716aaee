"""What is wrapped: networks of blocks, each with something that gradients may trip over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from differential.described import Described

WIDTH = 8


@dataclass(frozen=True)
class NetworkSpec(Described):
    """A network, before it is made.

    Attributes:
        blocks: kinds of the blocks ``b0``, ``b1``, ...: keys of :data:`BLOCKS`.
        frozen: blocks whose parameters require no gradient when the network is wrapped.
        output: how ``forward`` returns its tensors: a key of :data:`OUTPUTS`.
        checkpoint: how blocks are checkpointed: ``""``, ``"reentrant"`` or ``"not reentrant"``.
        tied: whether the first two blocks, both linear, share their weight.
    """

    blocks: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    output: str = "tensor"
    checkpoint: str = ""
    tied: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"b{number}" for number in range(len(self.blocks)))


# Each block maps (rows, WIDTH) of fp32 to the same.


class Linear(nn.Module):
    """The ordinary case, in any dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype))).float()


class Wide(nn.Module):
    """Gradients large enough to stay in their bucket's memory on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2000, WIDTH) / 50)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


class Convolution(nn.Module):
    """With batch normalisation, whose buffers differ between ranks after each forward."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.back = nn.Linear(27, WIDTH, bias=False)
        self.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.back(self.norm(self.convolution(x.view(-1, 2, 2, 2))).flatten(1)))


class Embedding(nn.Module):
    """Rows that a batch does not name get zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.detach().abs() * 100).long()
        return x * self.table(numbers[:, 0] % 11) + self.bag(numbers[:, 1:4] % 5)


class SparseEmbedding(nn.Module):
    """Gradients of the rows that a batch names, of some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(5, WIDTH, mode="sum", sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.detach().abs() * 100).long()
        y = x * self.table(numbers[:, 0] % 11) + self.bag(numbers[:, 1:4] % 5)
        return torch.tanh(y)


class OddShapes(nn.Module):
    """Parameters without dimensions, without elements, transposed, sliced, of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(3, 0))
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.sliced = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.permuted = nn.Parameter(torch.randn(2, 3, WIDTH).permute(2, 0, 1))
        self.single = nn.Parameter(torch.randn(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.transposed + x @ self.sliced) * self.scalar.tanh()
        return y * self.permuted.mean((1, 2)) * self.single + self.empty.sum()


class ExpandedGradients(nn.Module):
    """Gradients that come to the parameters expanded or transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = nn.Parameter(torch.randn(5, 3))
        self.row = nn.Parameter(torch.randn(WIDTH))
        self.flipped = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.summed.sum().tanh() * x + self.row.expand(len(x), WIDTH)
        return torch.tanh(y @ self.flipped.t())


class Stacked(nn.Module):
    """Many small parameters, more than one segment of a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(self.norm(x)))


class Buffered(nn.Module):
    """Buffers that take part in the graph, of several dtypes, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.rand(WIDTH))
        self.register_buffer("calls", torch.tensor(0), persistent=False)
        self.register_buffer("columns", torch.rand(4, 3, dtype=torch.float64).t())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.columns.mul_(0.5).add_(x.mean())
        y = self.linear(x) * self.factor + self.columns.sum().float()
        return torch.tanh(y / (1 + self.calls))


class Stateless(nn.Module):
    """Called through ``functional_call`` with parameters that have been computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: param.tanh() for name, param in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,))


class Normed(nn.Module):
    """A parametrized weight, dropout, and attention in which one parameter holds three."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.linear(x)).unsqueeze(1)
        return torch.tanh(self.attention(y, y, y, need_weights=False)[0].squeeze(1))


class Complex(nn.Module):
    """Complex parameters, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).t() / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.weight + self.bias
        return torch.tanh(y.real) + torch.tanh(y.imag)


class _Withheld(torch.autograd.Function):
    """Has a gradient for its weight for some inputs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight.sum().tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad, grad.sum().expand(3) if x.detach().sum() > 0 else None


class Withholding(nn.Module):
    """A custom function that returns no gradient, depending on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return _Withheld.apply(x, self.weight)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": Linear,
    "linear in fp64": lambda: Linear(torch.float64),
    "linear in bf16": lambda: Linear(torch.bfloat16),
    "wide": Wide,
    "convolution": Convolution,
    "convolution, channels last": lambda: Convolution(torch.channels_last),
    "embedding": Embedding,
    "sparse embedding": SparseEmbedding,
    "odd shapes": OddShapes,
    "expanded gradients": ExpandedGradients,
    "stacked": Stacked,
    "buffered": Buffered,
    "functional_call": Stateless,
    "normed": Normed,
    "complex": Complex,
    "withholding": Withholding,
}


@dataclass
class Outputs:
    """What a network may return its tensors in."""

    first: Tensor
    rest: list[Any]


# How the results of the two heads are returned, and found again.
OUTPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tensor": (lambda a, b: torch.cat([a, b], 1), lambda out: (out[:, :3], out[:, 3:])),
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "dict": (
        lambda a, b: {"a": a, "more": [None, (b,)]},
        lambda out: (out["a"], out["more"][1][0]),
    ),
    "dataclass": (lambda a, b: Outputs(a, [{"b": b}]), lambda out: (out.first, out.rest[0]["b"])),
}


class Network(nn.Module):
    """Runs the blocks it is told to, each beside a skip connection, and then two heads."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleDict(
            {name: BLOCKS[kind]() for name, kind in zip(spec.names, spec.blocks, strict=True)}
        )
        if spec.tied:
            self.blocks["b1"].linear.weight = self.blocks["b0"].linear.weight
        for name in spec.frozen:
            self.blocks[name].requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)])

    def forward(self, x: Tensor, path: Sequence[str]) -> Any:
        """``x`` is (rows, WIDTH) of fp32; returns (rows, 3) and (rows, 2) as the spec says."""
        for name in path:
            x = x + self._run(self.blocks[name], x)
        return OUTPUTS[self.spec.output][0](*(head(x) for head in self.heads))

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if not self.spec.checkpoint or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=self.spec.checkpoint == "reentrant")

    def results(self, output: Any) -> tuple[Tensor, Tensor]:
        """The results of the two heads, in what ``forward`` has returned."""
        return OUTPUTS[self.spec.output][1](output)
