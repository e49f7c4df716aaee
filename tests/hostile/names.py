"""The names on the wrapper are the user's, and a module may be TorchScript."""

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hostile.table import program
from hostile.training import steps

OUR_NAMES = """
    config group sync core caps traced buffer_sync state_broadcast
    metrics grad_norm _window _low _figures _config _core _group
"""


@program()
def attributes_on_the_wrapper(DDP, record):
    """Programs put attributes on the wrapper: ``model.config = ...``, ``model.sync = ...``.

    Stock: they are kept, and harmless.
    """
    for name in OUR_NAMES.split():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        ddp = DDP(net)
        try:
            setattr(ddp, name, {"hidden": 32})
            for _ in steps(ddp, 4, 8, 16):
                pass
            copy.deepcopy(ddp)
        except (AttributeError, TypeError, KeyError) as error:
            record(f"with ddp.{name} set", f"{type(error).__name__}: {error}")
        else:
            record(f"with ddp.{name} set", getattr(ddp, name))
            record.model(f"with ddp.{name} set", net)


OF_THE_MODULE = {
    "config": SimpleNamespace(hidden=32),
    "group": "a group",
    "sync": "sync",
    "caps": 3,
    "traced": False,
    "buffer_sync": "buffers",
    "state_broadcast": None,
    "scale": 0.5,
    "core": "core",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in OF_THE_MODULE.items():
            setattr(self, name, value)
        self.body, self.head = nn.Linear(16, self.config.hidden), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


@program()
def forwarding_subclass(DDP, record):
    """The subclass of many projects: attributes that DDP does not have are those of the module.

    Stock: ``ddp.config.hidden`` is the module's.
    """

    class Forwarding(DDP):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    ddp = Forwarding(Net())
    for name in OF_THE_MODULE:
        is_its = getattr(ddp, name) is getattr(ddp.module, name)
        record(f"ddp.{name} is the module's", is_its)
    record("ddp.body", type(ddp.body).__name__)
    for step in steps(ddp, 20, 8, 16):
        record.model(f"step {step}", ddp.module)
    record("hidden", ddp.config.hidden)


@program()
def scripted_module(DDP, record):
    """A module that is TorchScript is wrapped, and trains.

    Stock: as any other module.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    ddp = DDP(scripted)
    for step in steps(ddp, 6, 4, 8):
        record.model(f"step {step}", ddp.module)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fx": torch.fx.symbolic_trace,
    "part scripted": lambda net: nn.Sequential(nn.Linear(64, 64), torch.jit.script(net)),
    "traced": lambda net: torch.jit.trace(net, torch.randn(4, 64), check_trace=False),
    "scripted": torch.jit.script,
}


@program()
def scripted_parts(DDP, record):
    """Modules that torch.fx or torch.jit has traced, with a scripted part, or scripted.

    Stock: as any other module. With BatchNorm, whose buffers TorchScript keeps.
    """
    for title, convert in WAYS.items():
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            ddp = DDP(convert(plain))
        for step in steps(ddp, 22, 8, 64):
            record.model(f"{title}, step {step}", ddp.module)
