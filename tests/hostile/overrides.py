"""A module says by ``named_parameters()`` and its like which parameters and buffers it has."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hostile.table import program

STEPS = 4


class Net(nn.Module):
    """Two layers, of which ``a`` is what overrides are about, and a buffer of each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mine", torch.zeros(4))
        self.register_buffer("ours", torch.zeros(4))
        self.hides = True
        self.spare = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mine += 1 + dist.get_rank()
        self.ours += 1 + dist.get_rank()
        return self.a(x) + self.b(x) + self.mine + self.ours


class HidesParameters(Net):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        found = super().named_parameters(*args, **kwargs)
        return (each for each in found if not (self.hides and each[0].startswith("a.")))


class HidesLater(HidesParameters):
    def __init__(self) -> None:
        super().__init__()
        self.hides = False


class HidingLayer(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return (each for each in super().named_parameters(*args, **kwargs) if "bias" not in each[0])


class HasAHidingLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = HidingLayer(4, 4)


class Renames(Net):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        found = super().named_parameters(*args, **kwargs)
        return ((f"its_{name}", param) for name, param in found)


class YieldsMore(Net):
    """Parameters of a module that is no part of it: also where it is asked for its own alone."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.others[0](x))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from super().named_parameters(*args, **kwargs)
        for name, param in self.others[0].named_parameters():
            yield f"others.{name}", param


class HidesAModule(Net):
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return (each for each in super().named_modules(*args, **kwargs) if each[0] != "a")


class HidesBuffers(Net):
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        found = super().named_buffers(*args, **kwargs)
        return (each for each in found if not (self.hides and each[0] == "mine"))


class HidesBuffersLater(HidesBuffers):
    def __init__(self) -> None:
        super().__init__()
        self.hides = False


KINDS = [
    HidesParameters,
    HidesLater,
    HasAHidingLayer,
    Renames,
    YieldsMore,
    HidesAModule,
    HidesBuffers,
    HidesBuffersLater,
]


@program()
def named_members(DDP, record):
    """Parameters or buffers are hidden, renamed, or more, from the beginning or later.

    Stock: asks each part for its own parameters once, and the module for its buffers each time.
    """
    for kind in KINDS:
        torch.manual_seed(dist.get_rank())  # what is hidden is not sent at the beginning either
        net = kind()
        tensors = [*nn.Module.named_parameters(net), *nn.Module.named_buffers(net)]
        tensors += [
            ("other", each) for other in vars(net).get("others", ()) for each in other.parameters()
        ]
        ddp = DDP(net)
        for step in range(STEPS):
            if step == 1:
                net.hides = True
            if step == 2:
                net.spare.requires_grad_(True)  # parameters have changed
            for _, tensor in tensors:
                tensor.grad = None
            x = torch.randn(
                3, 4, generator=torch.Generator().manual_seed(9 * step + dist.get_rank())
            )
            ddp(x).pow(2).mean().backward()
            for name, tensor in tensors:
                record(f"{kind.__name__}, step {step}: {name}", tensor.detach())
                record(f"{kind.__name__}, step {step}: {name}.grad", tensor.grad)
