"""What is wrapped: networks of blocks, each with something that gradients may trip over."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from differential.named.models import Centered
from differential.program import NetworkSpec, Program

WIDTH = 8


# Each block maps (rows, WIDTH) to the same.


class Linear(nn.Module):
    """The ordinary case, in any dtype."""

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
        # (Without the outer one, which bounds it, trainings through several of them diverge.)
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
    """Complex parameters, one of them transposed, one used as its conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).t() / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.weight + self.bias.conj()
        return torch.tanh(y.real) + torch.tanh(y.imag)


class _Withheld(torch.autograd.Function):
    """Has a gradient for its weight for some inputs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight.sum().tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad, grad.sum().expand(3) if x.detach().sum() > 0 else None


class Withholding(nn.Module):
    """A custom function that returns no gradient, depending on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return _Withheld.apply(x, self.weight)


class Exchanged(torch.autograd.Function):
    """Rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = torch.empty_like(x)
        dist.all_to_all_single(rows, x.contiguous())
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Exchanged.forward(ctx, gradient)


class Collective(nn.Module):
    """Two layers, of which each rank may leave out one, a collective, and a layer behind it."""

    def __init__(self, collective: type[torch.autograd.Function], chooses: bool) -> None:
        super().__init__()
        self.collective, self.chooses = collective, chooses
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.behind = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left_out = int(torch.randint(3, (), device="cpu")) if self.chooses else 2
        taken = [branch(x) for number, branch in enumerate(self.branches) if number != left_out]
        return torch.tanh(self.behind(self.collective.apply(torch.stack(taken).sum(0))))


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
    "stacked": Stacked,
    "buffered": Buffered,
    "functional_call": Stateless,
    "normed": Normed,
    "complex": Complex,
    "withholding": Withholding,
}
# With collectives of their own, for programs that are about those.
BRANCHES = " behind branches"
COLLECTIVES: dict[str, Callable[[], nn.Module]] = {
    "all-reduce": partial(Collective, Centered, False),
    "all-to-all": partial(Collective, Exchanged, False),
    f"all-reduce{BRANCHES}": partial(Collective, Centered, True),
    f"all-to-all{BRANCHES}": partial(Collective, Exchanged, True),
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


# Kinds of buffers, by name: made anew for each network.
BUFFERS: dict[str, Callable[[], Tensor]] = {
    "shift": lambda: torch.randn(WIDTH),
    "scale": lambda: torch.rand(WIDTH) + 0.5,
    "factor": lambda: torch.ones(()),
    "table": lambda: torch.randn(WIDTH, 3).t(),  # transposed
    "count": lambda: torch.zeros((), dtype=torch.int64),
    "mask": lambda: torch.ones(WIDTH, dtype=torch.bool),
    "low": lambda: torch.randn(WIDTH).bfloat16(),
    "wide": lambda: torch.randn(WIDTH, dtype=torch.float64),
    "large": lambda: torch.randn(40_000),
    "nothing": lambda: torch.empty(0),
}


# How a buffer is written.
WAYS = (
    *("in place", "through .data", "as .data", "reassigned", "through numpy"),
    "by load_state_dict",
)
# Those that autograd does not see, so that a backward through an older forward goes on.
UNSEEN = ("through .data", "as .data", "reassigned", "through numpy")


def write_buffer(way: str, owner: nn.Module, name: str, value: Tensor) -> None:
    buffer = getattr(owner, name)
    value = value.to(buffer.dtype)
    match way:
        case "in place":
            with torch.no_grad():
                buffer.copy_(value)
        case "through numpy" if buffer.dtype is not torch.bfloat16:  # which numpy does not know
            buffer.numpy()[...] = value.numpy()
        case "through .data" | "through numpy":
            buffer.data.copy_(value)
        case "as .data":
            buffer.data = value.clone()
        case "reassigned":
            setattr(owner, name, value.clone())
        case "by load_state_dict":
            owner.load_state_dict({name: value}, strict=False)
        case _:
            raise ValueError(way)


class Buffers(nn.Module):
    """Computes with buffers, and keeps none of them for the backward."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        for kind in kinds:
            self.register_buffer(kind, BUFFERS[kind](), persistent=kind != "low")

    def forward(self, x: Tensor) -> Tensor:
        for kind, buffer in self.named_buffers():
            value = buffer.detach().clone()
            match kind:
                case "shift" | "low" | "wide":
                    x = x + value.to(x.dtype)
                case "scale" | "mask" | "factor":
                    x = x * value.to(x.dtype)
                case "table" | "large":
                    x = x + value.sum().to(x.dtype) / value.numel()
                case "count":
                    x = x + 0.01 * value.to(x.dtype)
        return x


class Network(nn.Module):
    """Runs the blocks it is told to, each beside a skip connection, and then two heads.

    Args:
        spec: of the network.
        encoder: the first block, where another network has it too.
    """

    def __init__(self, spec: NetworkSpec, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.spec, self.forwards = spec, 0
        makers = BLOCKS | COLLECTIVES
        self.blocks = nn.ModuleDict(
            {
                name: encoder if encoder is not None and name == "b0" else makers[kind]()
                for name, kind in zip(spec.names, spec.blocks, strict=True)
            }
        )
        if spec.tied:
            self.blocks["b1"].linear.weight = self.blocks["b0"].linear.weight
        for name in spec.frozen:
            self.blocks[name].requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)])
        self.state = Buffers(spec.buffers)
        # What users call their attributes.
        self.config, self.sync, self.group, self.caps = {"hidden": WIDTH}, "sync", "group", 3
        if spec.overrides:
            part, cls = OVERRIDES[spec.overrides]
            self.get_submodule(part).__class__ = cls

    def forward(self, x: Tensor, path: Sequence[str] | None = None) -> Any:
        """``x`` is (rows, WIDTH); returns (rows, 3) and (rows, 2) as the spec says."""
        self.forwards += 1
        for number, name in enumerate(self.spec.names if path is None else path):
            x = x + self._run(self.blocks[name], x)
            if number == 0 and self.spec.buffers:
                x = self._with_buffers(x)
        if self.spec.made_later:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", x.detach().mean(0))
            x = x - self.mean
        if not self.spec.hides:
            return OUTPUTS[self.spec.output][0](*self._of_heads(x))
        if not torch.is_grad_enabled():
            return SimpleNamespace(results=self._of_heads(x))
        return SimpleNamespace(results=checkpoint(self._of_heads, x, use_reentrant=True))

    def _of_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(head(x) for head in self.heads)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if not self.spec.checkpoint or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=self.spec.checkpoint == "reentrant")

    def results(self, output: Any) -> tuple[Tensor, Tensor]:
        """The results of the two heads, in what ``forward`` has returned."""
        if self.spec.hides:
            return output.results
        return OUTPUTS[self.spec.output][1](output)

    def whole(self, output: Any) -> Tensor:
        """The same as one tensor."""
        return torch.cat(output.results, 1) if self.spec.hides else output

    def submodule(self, x: Tensor) -> Tensor:
        """A part of it, with the first block alone."""
        return torch.tanh(self.blocks["b0"](x))

    def penalty(self) -> Tensor:
        """By the parameters alone: also those that an override hides."""
        params = [param for _, param in nn.Module.named_parameters(self)]
        return torch.stack([param.pow(2).sum() for param in params]).sum()

    def owned_buffers(self) -> Iterator[tuple[nn.Module, str]]:
        """Each buffer, as the module that owns it and the name that it has there."""
        for module in self.modules():
            for name in module._buffers:
                yield module, name

    def _with_buffers(self, x: Tensor) -> Tensor:
        if self.training and self.forwards > self.spec.quiet:
            if self.spec.written_in_forward:
                self._write(self.spec.written_in_forward, x)
            if self.spec.written_in_backward and x.requires_grad:
                x.register_hook(
                    lambda gradient: self._write(self.spec.written_in_backward, gradient)
                )
        return self.state(x)

    def _write(self, way: str, seen: Tensor) -> None:
        """A moving average of what this rank sees goes into the first of its buffers."""
        name = self.spec.buffers[0]
        buffer = getattr(self.state, name)
        value = buffer + 1
        if buffer.dtype.is_floating_point:
            value = buffer.double() * 0.9 + seen.detach().mean().double() * 0.1
        write_buffer(way, self.state, name, value)


def _overriding(method: str, change: Callable[..., Any], base: type = Network) -> type[nn.Module]:
    """A class that changes the names of ``named_parameters()``, say; ``None`` hides one."""

    def named(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for name, each in getattr(base, method)(self, *args, **kwargs):
            if (changed := change(self, name)) is not None:
                yield changed, each

    return type(f"Overrides{base.__name__}", (base,), {method: named})


def _without(part: str, later: bool = False) -> Callable[[Any, str], str | None]:
    """Hide tensors whose own name has this part, or only after two forwards."""

    def change(net: Any, name: str) -> str | None:
        is_hidden = part in name.rpartition(".")[2] and not (later and net.forwards <= 2)
        return None if is_hidden else name

    return change


# By which class ``named_parameters()`` or ``named_buffers()`` of a part of the network is another.
OVERRIDES: dict[str, tuple[str, type[nn.Module]]] = {
    "hides weights": ("", _overriding("named_parameters", _without("weight"))),
    "hides biases later": ("", _overriding("named_parameters", _without("bias", later=True))),
    "renames parameters": ("", _overriding("named_parameters", lambda _, name: f"its_{name}")),
    "hides buffers": ("", _overriding("named_buffers", _without("s"))),
    "hides buffers later": ("", _overriding("named_buffers", _without("a", later=True))),
    "hides a module": (
        "",
        _overriding("named_modules", lambda _, name: None if name == "heads.1" else name),
    ),
    "hides a bias of a layer": (
        "heads.0",
        _overriding("named_parameters", _without("bias"), nn.Linear),
    ),
}


def another_value(buffer: Tensor) -> Tensor:
    """Drawn anew, of its kind: each rank draws its own unless they are seeded alike."""
    if buffer.dtype is torch.bool:
        return torch.rand(buffer.shape) > 0.3
    if not buffer.dtype.is_floating_point:
        return torch.randint(0, 9, buffer.shape, dtype=buffer.dtype)
    return (torch.rand(buffer.shape, dtype=torch.float64) + 0.5).to(buffer.dtype)


def build(program: Program, rank: int) -> list[Network]:
    """The networks as ``rank`` makes them: others at first, where wrapping makes them alike."""
    options = program.options
    alike = not program.is_hostile and False in (options.init_sync, options.broadcast_buffers)
    torch.default_generator.manual_seed(program.seed * 10 + (0 if alike else rank))
    spec, networks = program.network, [Network(program.network)]
    if program.wrappers in ("two groups", "ring of pairs"):
        networks += [Network(spec) for _ in range(1 if program.wrappers == "two groups" else 2)]
    elif program.wrappers == "shared encoder":
        networks.append(Network(spec, networks[0].blocks["b0"]))
    if spec.ignored:
        names = [
            f"blocks.{spec.ignored}.{name}"
            for name, _ in networks[0].blocks[spec.ignored].named_parameters()
        ]
        Stock._set_params_and_buffers_to_ignore_for_model(networks[0], names)
    if program.is_hostile and program.world_size > 2:
        # Sums in another order round otherwise: nothing that a comparison would have to let pass.
        for network in networks:
            for module in network.modules():
                if not isinstance(module, Network | Buffers):
                    module.to(torch.float64)
    return networks
