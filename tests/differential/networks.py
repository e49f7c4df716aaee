"""What is wrapped: networks of blocks, each with an unusual kind of parameter or gradient."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from differential.named.models import Centered
from differential.program import NetworkSpec, Program

WIDTH = 8


# Each block maps (rows, WIDTH) to the same.


class Linear(nn.Module):
    """The usual case, in any dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype))).to(x.dtype)


class Wide(nn.Module):
    """Gradients large enough to stay in their bucket's memory on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2000, WIDTH) / 50)

    def forward(self, x: Tensor) -> Tensor:
        # The outer tanh bounds the output: trainings through several blocks would diverge.
        return torch.tanh(torch.tanh(x @ self.weight.t()) @ self.weight)


class Convolution(nn.Module):
    """With batch normalization, whose buffers differ between ranks after each forward."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.back = nn.Linear(27, WIDTH, bias=False)
        self.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.back(self.norm(self.convolution(x.view(-1, 2, 2, 2))).flatten(1)))


class Embedding(nn.Module):
    """Rows that a batch does not name get zeros; or sparse gradients, without these rows."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, padding_idx=None if sparse else 0, sparse=sparse)
        self.bag = nn.EmbeddingBag(5, WIDTH, mode="sum" if sparse else "mean", sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.detach().abs() * 100).long()
        y = x * self.table(numbers[:, 0] % 11) + self.bag(numbers[:, 1:4] % 5)
        return torch.tanh(y) if self.table.sparse else y


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
    """Gradients that are expanded or transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = nn.Parameter(torch.randn(5, 3))
        self.row = nn.Parameter(torch.randn(WIDTH))
        self.flipped = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.summed.sum().tanh() * x + self.row.expand(len(x), WIDTH)
        return torch.tanh(y @ self.flipped.t())


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
    """Complex parameters, one of them transposed, one used as its conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).t() / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.weight + self.bias.conj()
        return torch.tanh(y.real) + torch.tanh(y.imag)


class Collective(nn.Module):
    """Two layers, of which each rank may leave out one, a collective, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left_out = int(torch.randint(3, ()))
        taken = [branch(x) for number, branch in enumerate(self.branches) if number != left_out]
        return torch.tanh(self.last(Centered.apply(torch.stack(taken).sum(0))))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": Linear,
    "linear in fp64": partial(Linear, torch.float64),
    "linear in bf16": partial(Linear, torch.bfloat16),
    "wide": Wide,
    "convolution": Convolution,
    "convolution, channels last": partial(Convolution, torch.channels_last),
    "embedding": Embedding,
    "sparse embedding": partial(Embedding, sparse=True),
    "odd shapes": OddShapes,
    "expanded gradients": ExpandedGradients,
    "buffered": Buffered,
    "normed": Normed,
    "complex": Complex,
}
AFTER_BRANCHES = "all-reduce after branches"  # a block whose forward and backward communicate


# How the results of the two heads are returned, and found again.
OUTPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tensor": (lambda a, b: torch.cat([a, b], 1), lambda out: (out[:, :3], out[:, 3:])),
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "dict": (
        lambda a, b: {"a": a, "more": [None, (b,)]},
        lambda out: (out["a"], out["more"][1][0]),
    ),
}


# Kinds of buffers, by name.
BUFFERS: dict[str, Callable[[], Tensor]] = {
    "shift": lambda: torch.randn(WIDTH),
    "table": lambda: torch.randn(WIDTH, 3).t(),  # transposed
    "count": lambda: torch.zeros((), dtype=torch.int64),
    "mask": lambda: torch.ones(WIDTH, dtype=torch.bool),
    "low": lambda: torch.randn(WIDTH).bfloat16(),  # in no state_dict
    "large": lambda: torch.randn(40_000, dtype=torch.float64),
    "nothing": lambda: torch.empty(0),
}


class Buffers(nn.Module):
    """Computes with buffers, and keeps none of them for the backward."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        for kind in kinds:
            self.register_buffer(kind, BUFFERS[kind](), persistent=kind != "low")

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            if buffer.numel():
                x = x + buffer.detach().double().mean().to(x.dtype) / 10
        return x


class Network(nn.Module):
    """Blocks with skip connections, then two heads. It may share ``encoder``, its first block."""

    def __init__(self, spec: NetworkSpec, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.spec = spec
        makers = BLOCKS | {AFTER_BRANCHES: Collective}
        self.blocks = nn.ModuleDict()
        for name, kind in zip(spec.names, spec.blocks, strict=True):
            self.blocks[name] = encoder if encoder and name == "b0" else makers[kind]()
        if spec.tied:
            self.blocks["b1"].linear.weight = self.blocks["b0"].linear.weight
        for name in spec.frozen:
            self.blocks[name].requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)])
        self.state = Buffers(spec.buffers)

    def forward(self, x: Tensor, path: Sequence[str] | None = None) -> Any:
        """``x`` is (rows, WIDTH); returns (rows, 3) and (rows, 2) as the spec says."""
        for number, name in enumerate(self.spec.names if path is None else path):
            x = x + self._run(self.blocks[name], x)
            if number == 0 and self.spec.buffers:
                x = self.state(x)
        return OUTPUTS[self.spec.output][0](*(head(x) for head in self.heads))

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if not self.spec.checkpoint or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=self.spec.checkpoint == "reentrant")

    def results(self, output: Any) -> tuple[Tensor, Tensor]:
        """The results of the two heads, found in the output of ``forward``."""
        return OUTPUTS[self.spec.output][1](output)


def build(program: Program, rank: int) -> list[Network]:
    """The networks of ``rank``, with other values than on other ranks if wrapping sends them."""
    syncs = (program.options.get(name, True) for name in ("init_sync", "broadcast_buffers"))
    differs = program.is_hostile or all(syncs)
    torch.default_generator.manual_seed(program.seed * 10 + (rank if differs else 0))
    networks = [Network(program.network)]
    if program.has_critic:
        networks.append(Network(program.network, networks[0].blocks["b0"]))
    if program.dtype is torch.float64:
        for network in networks:
            network.blocks.double()
            network.heads.double()
    return networks
