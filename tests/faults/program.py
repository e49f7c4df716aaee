"""The program of each rank: some steps of training, with a fault on one rank.

After each step, a rank compares its gradients with the mean over all ranks, computed by an
unwrapped model. At the end it returns a :class:`Seen`.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from faults import differences
from faults.points import STRUCK_AT, strike_before
from faults.table import Fault
from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer
from tritonddp.coordination.host import connect

STEPS = 5
WIDTH = 6


class Net(nn.Module):
    """Layers of one width, with an embedding or a buffer in some loops."""

    def __init__(self, loop: str, width: int, kind: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=kind) for _ in range(4))
        if loop == "sparse":
            self.rows = nn.Embedding(9, width, sparse=True, dtype=kind)
        if loop in ("buffers", "check"):
            self.register_buffer("seen", torch.zeros(3, dtype=kind))
        self.within: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rows"):
            x = x + self.rows((x.sum(1).abs() * 10).long() % 9)
        for number, layer in enumerate(self.layers):
            if number == 1:
                self.within()
            x = torch.tanh(layer(x))
        if hasattr(self, "seen"):
            self.seen += 1.0
        return x


class Struck(Exception):
    """The exception of a fault of the kind ``"raise"``."""


class Behind(Exception):
    """The rank skips the rest of its step."""


class Ended(Exception):
    """Training ends after an error."""


@dataclass
class Seen:
    """The results of a rank.

    Attributes:
        errors: step and text of each error.
        wrong: wrong gradients for which no error was raised.
        nan: names of the parameters with NaN in their gradients, by step.
        right: steps with correct gradients.
        ended: the rank reached the end of its program.
    """

    errors: list[tuple[int, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    nan: dict[int, list[str]] = field(default_factory=dict)
    right: list[int] = field(default_factory=list)
    ended: bool = False


class Program:
    """One rank of a fault.

    Args:
        struck: called on the victim immediately before the fault.
    """

    def __init__(
        self, fault: Fault, rank: int, world_size: int, struck: Callable[[], None]
    ) -> None:
        self.fault, self.rank, self.world_size = fault, rank, world_size
        self.point = fault.point
        self.seen = Seen()
        self.step = -1
        self.steps = iter(range(self.inputs_of(rank)))
        self._struck = struck
        self._calls = 0
        if self.point.loop == "hosts":
            connect._host = lambda: f"host {rank // 2}"
        if ":" in self.point.before:
            strike_before(self.point.before, lambda: self.line(self.point.before))

    @property
    def is_victim(self) -> bool:
        return self.rank == self.fault.victim

    # The fault

    def line(self, name: str) -> bool:
        """Run the fault if it belongs to this line. Return whether this gradient becomes NaN."""
        if name != self.point.before or self.point.step not in (None, self.step):
            return False
        self._calls += 1
        if self._calls == self.point.call + 1 and self.is_victim:
            self._struck()
            self.strike()
            return True
        return False

    def strike(self) -> None:
        match self.fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "orphan":  # a forked worker keeps the sockets open
                launcher = Path(f"/proc/{os.getppid()}")
                if not os.fork():
                    while launcher.exists():
                        time.sleep(0.1)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "loop":
                time.sleep(3600)
            case "leave":
                dist.destroy_process_group()
                os._exit(0)
            case "raise":
                raise Struck("struck")
            case "interrupt":
                raise KeyboardInterrupt
            case "behind":
                raise Behind

    # Training

    def run(self) -> dict[str, Any]:
        """Train until the end or a fatal error. Return :class:`Seen` as a dictionary."""
        try:
            self.line("wrap")
            ddp = self.wrap()
            self.optimizer = self.optimizer_of(ddp)
            with ddp.join() if self.point.loop == "join" else nullcontext():
                for step in self.steps:
                    self.one_step(ddp, step)
            self.seen.ended = True
        except Ended:
            pass
        except RuntimeError as error:  # while wrapping, or of a rank without inputs
            self.seen.errors.append((self.step, str(error)))
        if self.seen.ended and self.is_behind(self.rank):
            time.sleep(3600)  # the other ranks wait for it
        return asdict(self.seen)

    def wrap(self) -> DistributedDataParallel:
        options, width = {"bucket_cap_mb": 3e-4, **self.fault.options}, WIDTH
        if self.differs:
            self._struck()
            width = 8 if self.fault.at == "wider module" else WIDTH
            if self.fault.at == "other bucket sizes":
                options["bucket_cap_mb"] = 1
        ddp = DistributedDataParallel(self.make(width), **options)
        if "wrapper" in self.fault.at:
            other = self.make(WIDTH // 2 if "smaller" in self.fault.at else WIDTH)
            self.other = DistributedDataParallel(other, **options)
        net = ddp.module
        net.within = lambda: self.line("module forward")
        for name, number in {"first layer": 0, "second layer": 1, "last layer": -1}.items():
            net.layers[number].weight.register_hook(partial(self.gradient, name))
        return ddp

    def optimizer_of(self, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
        if self.point.loop != "sharded":
            return torch.optim.SGD(ddp.parameters(), lr=0.1)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.5)
        optimizer.optim.register_step_pre_hook(lambda *_: self.line("owned") or None)
        return optimizer

    def make(self, width: int = WIDTH) -> Net:
        """The unwrapped module. Small parameters and fp64 are not quantized."""
        kind = (32, torch.float32) if self.is_compressed else (width, torch.float64)
        return Net(self.point.loop, *kind)

    @property
    def is_compressed(self) -> bool:
        return "int8" in self.fault.words

    @property
    def differs(self) -> bool:
        """Whether this rank runs other operations than the other ranks."""
        return self.fault.kind == "differ" and self.is_victim

    def is_behind(self, rank: int) -> bool:
        """Whether the rank skips a step: afterwards it is one batch ahead."""
        return self.fault.kind == "behind" and rank == self.fault.victim

    def gradient(self, name: str, grad: Tensor) -> Tensor | None:
        """A hook of a gradient."""
        if self.line(f"gradient of {name}"):
            return torch.full_like(grad, torch.nan)
        return None

    def one_step(self, ddp: DistributedDataParallel, step: int) -> None:
        """Train one step. Raise :class:`Ended` if training does not continue."""
        self.step, self._calls = step, 0 if self.point.step is not None else self._calls
        self.optimizer.zero_grad()
        try:
            self.backward(ddp, step)
            self.line("optimizer")
            if self.is_right(ddp, step):
                self.optimizer.step()
        except (Struck, KeyboardInterrupt) as error:
            self.seen.errors.append((step, f"{type(error).__name__}: {error}"))
        except Behind:
            pass
        except (RuntimeError, FloatingPointError) as error:
            self.seen.errors.append((step, str(error)))
            if not self.fault.continues:
                raise Ended from error

    def backward(self, ddp: DistributedDataParallel, step: int) -> None:
        """Forward and backward of a step."""
        if self.differs and step == STRUCK_AT and self.fault.at in differences.STEPS:
            self._struck()
            differences.STEPS[self.fault.at](self, ddp, step)
            return
        self.line("forward")
        loss = self.loss(ddp, self.rank, step)
        self.line("loss")
        loss.backward()
        if self.point.loop == "check":
            ddp.check_sync()

    def loss(self, net: nn.Module, rank: int, step: int) -> Tensor:
        torch.default_generator.manual_seed(1000 * step + 10 * rank)
        weight = getattr(net, "module", net).layers[0].weight
        return net(torch.randn(5, weight.shape[1], dtype=weight.dtype)).square().mean()

    def inputs_of(self, rank: int) -> int:
        """The number of steps of a rank. Inside ``join()``, one rank has fewer."""
        if self.point.loop != "join":
            return STEPS
        follows = self.fault.victim if self.point.step is None else self.fault.victim + 1
        return STEPS - 2 if rank == follows % self.world_size else STEPS

    # Expected gradients

    def is_right(self, ddp: DistributedDataParallel, step: int) -> bool:
        """Return whether no gradient is NaN. Note other wrong gradients."""
        is_ahead = self.is_behind(self.rank) and step > STRUCK_AT
        expected = self.expected(ddp.module, step - is_ahead)
        tolerance = 0.1 if self.is_compressed else 1e-12
        wrong = []
        owners = getattr(self.optimizer, "_owners", {})
        for name, param in ddp.module.named_parameters():
            if param.grad is None and owners.get(param, self.rank) != self.rank:
                continue  # another rank owns the parameter
            grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
            if grad.isnan().any():
                self.seen.nan.setdefault(step, []).append(name)
            elif (grad - expected[name]).norm() > tolerance * max(expected[name].norm(), 1e-3):
                wrong.append(f"step {step}: gradient of {name} is wrong on rank {self.rank}")
        self.seen.wrong += wrong
        if step in self.seen.nan:
            return False
        if not wrong:
            self.seen.right.append(step)
        return True

    def expected(self, net: Net, step: int) -> dict[str, Tensor]:
        """The mean over the ranks of the gradients of an unwrapped model."""
        total: dict[str, Tensor] = {}
        for rank in range(self.world_size):
            if step >= self.inputs_of(rank):
                continue
            alone = self.make()  # no fault occurs in it
            alone.load_state_dict(net.state_dict())
            batch = step + (self.is_behind(rank) and step >= STRUCK_AT)
            self.loss(alone, rank, batch).backward()
            for name, param in alone.named_parameters():
                if param.grad is not None:
                    total[name] = total.get(name, 0) + param.grad.to_dense() / self.world_size
        return total
