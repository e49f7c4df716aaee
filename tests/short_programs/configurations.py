"""What is wrapped, and how: a configuration is named by its parts, ``hidden+views``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint

import tritonddp

WIDTH = 4
STOCK, OURS = "stock", "ours"
WRAPPERS: dict[str, Any] = {STOCK: Stock, OURS: tritonddp.DistributedDataParallel}


class Bare(nn.Module):
    """Three layers, and no buffer; a forward may leave out the one in the middle."""

    # The parameters and buffers that each rank keeps for itself.
    ignored: tuple[str, ...] = ()

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def features(self, x: Tensor, skips: bool) -> Tensor:
        h = self.a(x).tanh()
        return h if skips else self.b(h).tanh()

    def forward(self, x: Tensor, skips: bool = False) -> Any:
        return self.c(self.features(x, skips))

    @property
    def last_layer(self) -> nn.Linear:
        """``c``, wherever it has been put."""
        return next(each for each in self.c.modules() if isinstance(each, nn.Linear))

    @property
    def last_weight(self) -> nn.Parameter:
        return next(self.last_layer.parameters())

    def loss_input(self, output: Any) -> Callable[[], Tensor]:
        """Return what gives the tensor of the loss, when the program asks for it."""
        return lambda: output


class Norm(Bare):
    """With buffers that each forward changes."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.norm = nn.BatchNorm1d(6)

    def features(self, x: Tensor, skips: bool) -> Tensor:
        h = self.norm(self.a(x)).tanh()
        return h if skips else self.b(h).tanh()


class Hidden(Bare):
    """The output hides its tensor, and the first gradient comes inside an inner backward."""

    def forward(self, x: Tensor, skips: bool = False) -> Any:
        return SimpleNamespace(t=self.last(self.features(x, skips)))

    def last(self, h: Tensor) -> Tensor:
        return checkpoint(self.c, h, use_reentrant=True)

    def loss_input(self, output: Any) -> Callable[[], Tensor]:
        return lambda: output.t


class _InnerBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: nn.Module, h: Tensor) -> Tensor:
        ctx.layer, ctx.h = layer, h.detach()
        return layer(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        h = ctx.h.requires_grad_()
        h.grad = None
        with torch.enable_grad():
            ctx.layer(h).backward(grad)
        return None, h.grad


class Function(Hidden):
    """The same with a function of the user's that runs a backward inside its own."""

    def last(self, h: Tensor) -> Tensor:
        return _InnerBackward.apply(self.c, h)


class Caught(Hidden):
    """The output is ``None``; the loss uses what a forward hook has caught."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.feature = nn.Identity()
        self.caught: list[Tensor] = []
        self.feature.register_forward_hook(lambda module, args, output: self.caught.append(output))

    def forward(self, x: Tensor, skips: bool = False) -> Any:
        self.caught.clear()
        self.feature(self.last(self.features(x, skips)))

    def loss_input(self, output: Any) -> Callable[[], Tensor]:
        return [*self.caught].pop


class Expert(Bare):
    """The last layer is each rank's own: it is ignored by the names that it has at wrapping."""

    ignored = ("c.weight", "c.bias")

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        torch.manual_seed(100 + rank)
        self.c = nn.Linear(6, 2)


class Cache(Bare):
    """No buffer at wrapping, one of each rank's own values in the first forward.

    And each forward assigns a module.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("mean", None)

    def features(self, x: Tensor, skips: bool) -> Tensor:
        self.criterion = nn.MSELoss()
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return super().features(x - self.mean, skips)


class _WhenAsked(Mapping[str, Tensor]):
    """Computes its values when they are asked for, with a random number."""

    def __init__(self, h: Tensor) -> None:
        self._h = h

    def __getitem__(self, key: str) -> Tensor:
        return self._h * (1 + torch.rand((), dtype=self._h.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(("logits",))

    def __len__(self) -> int:
        return 1


class Lazy(Bare):
    """The output is a mapping that nobody but the program may ask."""

    def forward(self, x: Tensor, skips: bool = False) -> Any:
        return _WhenAsked(super().forward(x, skips))

    def loss_input(self, output: Any) -> Callable[[], Tensor]:
        return lambda: output["logits"]


NETS: dict[str, type[Bare]] = {
    cls.__name__.lower(): cls for cls in (Norm, Bare, Hidden, Function, Caught, Expert, Cache, Lazy)
}


def _allreduce(ddp: Any, evaluate: Callable[[], None]) -> None:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def _probe(ddp: Any, evaluate: Callable[[], None]) -> None:
    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        evaluate()
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    ddp.register_comm_hook(None, hook)


# Parts of a configuration beside the network, each with options of both, of stock alone and of
# ours alone.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "views": ({"gradient_as_bucket_view": True}, {}, {}),
    "unused": ({"find_unused_parameters": True}, {}, {}),
    "finds": ({}, {"find_unused_parameters": True}, {}),
    "small": ({"bucket_cap_mb": 1e-5}, {}, {}),
    "static": ({"static_graph": True}, {}, {}),
    "nobuf": ({"broadcast_buffers": False}, {}, {}),
    "group": ({}, {}, {"transport": "process_group"}),
    # After two usual steps: buckets are rebuilt, and ranks share memory.
    "warm": ({}, {}, {}),
}
HOOKS: dict[str, Callable[[Any, Callable[[], None]], None]] = {
    "allreduce": _allreduce,
    "probe": _probe,  # it evaluates the wrapper
}
IN_PLACE = "replicate"
JUDGE = "judge"  # each loss is that of another wrapper, whose communication hook evaluates this one


@dataclass(frozen=True)
class Configuration:
    """What is wrapped, and how; ``name`` joins the parts."""

    name: str
    net: str = "norm"
    parts: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, name: str) -> "Configuration":
        parts = name.split("+")
        unknown = {*parts} - {*NETS, *OPTIONS, *HOOKS, IN_PLACE, JUDGE}
        if unknown:
            raise ValueError(f"unknown parts of a configuration: {sorted(unknown)}")
        net = next((part for part in parts if part in NETS), "norm")
        return cls(name, net, frozenset(parts))

    @property
    def head(self) -> str:
        """The events before each word."""
        return "FBSFBSZ" if "warm" in self.parts else ""

    @property
    def finds_unused(self) -> bool:
        return bool({"unused", "finds"} & self.parts)

    @property
    def is_in_place(self) -> bool:
        return IN_PLACE in self.parts

    @property
    def broadcasts(self) -> bool:
        return self.net == "norm" and "nobuf" not in self.parts

    def wrap(self, side: str, net: Bare, evaluate: Callable[[], None]) -> Any:
        """Wrap the network; ``evaluate`` runs what this returns."""
        options: dict[str, Any] = {}
        for part in sorted(self.parts & OPTIONS.keys()):
            both, stock, ours = OPTIONS[part]
            options |= both | (stock if side == STOCK else ours)
        Stock._set_params_and_buffers_to_ignore_for_model(net, [*net.ignored])
        if side != STOCK and self.is_in_place:
            ddp: Any = tritonddp.replicate(net, **options)
        else:
            ddp = WRAPPERS[side](net, **options)
        for part in sorted(self.parts & HOOKS.keys()):
            HOOKS[part](ddp, evaluate)
        return ddp

    def wrap_judge(self, side: str, dtype: torch.dtype, evaluate: Callable[[], None]) -> Any:
        if JUDGE not in self.parts:
            return nn.Identity()
        judge = WRAPPERS[side](nn.Linear(2, 2, dtype=dtype))
        _probe(judge, evaluate)
        return judge
