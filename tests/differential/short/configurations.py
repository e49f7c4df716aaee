"""What is wrapped, and how: a configuration is named by its parts, ``hidden+views``."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint

import tritonddp
from differential.wrappers import OURS, WRAPPERS

WIDTH = 4
STOCK = "stock"  # the key of stock DDP in WRAPPERS


class Bare(nn.Module):
    """Three layers, and no buffer; a forward may skip the layer in the middle."""

    # The parameters and buffers that each rank keeps local.
    ignored: tuple[str, ...] = ()

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def features(self, x: Tensor, skips: bool) -> Tensor:
        h = self.first(x).tanh()
        return h if skips else self.b(h).tanh()

    def first(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor, skips: bool = False) -> Any:
        return self.c(self.features(x, skips))

    @property
    def last_layer(self) -> nn.Linear:
        """``c``, or the layer in the module that replaced it."""
        return next(each for each in self.c.modules() if isinstance(each, nn.Linear))

    def rename(self) -> None:
        self.c = nn.Sequential(self.c)


class Norm(Bare):
    """Each forward changes buffers."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.norm = nn.BatchNorm1d(6)

    def first(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x))


class Hidden(Bare):
    """The output hides its tensor, and the first gradient is ready inside an inner backward."""

    def forward(self, x: Tensor, skips: bool = False) -> Any:
        output = checkpoint(self.c, self.features(x, skips), use_reentrant=True)
        return SimpleNamespace(hidden=output)


class Expert(Bare):
    """Each rank has a local last layer, which is ignored by its names at wrapping."""

    ignored = ("c.weight", "c.bias")

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        torch.manual_seed(100 + rank)
        self.c = nn.Linear(6, 2)


class Cache(Bare):
    """The first forward makes a buffer of rank-local values, and each forward assigns a module."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("mean", None)

    def first(self, x: Tensor) -> Tensor:
        self.criterion = nn.MSELoss()
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.a(x - self.mean)


NETS: dict[str, type[Bare]] = {
    cls.__name__.lower(): cls for cls in (Norm, Bare, Hidden, Expert, Cache)
}
# The other parts of a configuration: options.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {},  # two usual steps before each program: buckets are rebuilt, and ranks share memory
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "small": {"bucket_cap_mb": 1e-5},
    "static": {"static_graph": True},
    "nobuf": {"broadcast_buffers": False},
    "group": {"transport": "process_group"},  # of tritonddp
}
ALLREDUCE = "allreduce"  # the communication hook of torch
IN_PLACE = "replicate"
PARTS = {*NETS, *OPTIONS, ALLREDUCE, IN_PLACE}


class Configuration:
    """What is wrapped, and how."""

    def __init__(self, name: str) -> None:
        self.name, self.parts = name, frozenset(name.split("+"))
        if unknown := self.parts - PARTS:
            raise ValueError(f"unknown parts of a configuration: {sorted(unknown)}")
        self.net = next((part for part in NETS if part in self.parts), "norm")
        self.head = "FBSFBSZ" if "warm" in self.parts else ""  # the events before each word
        self.is_in_place = IN_PLACE in self.parts
        self.broadcasts = self.net == "norm" and "nobuf" not in self.parts

    def wrap(self, wrapper: str, net: Bare) -> Any:
        """Wrap the network with a class of ``WRAPPERS``."""
        options: dict[str, Any] = {}
        for part in self.parts & OPTIONS.keys() - ({"group"} if wrapper != OURS else set()):
            options |= OPTIONS[part]
        Stock._set_params_and_buffers_to_ignore_for_model(net, [*net.ignored])
        if wrapper == OURS and self.is_in_place:
            ddp: Any = tritonddp.replicate(net, **options)
        else:
            ddp = WRAPPERS[wrapper](net, **options)
        if ALLREDUCE in self.parts:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        return ddp
