"""Small programs for the recorded device, one for each path of gradients through the wrapper."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import tritonddp
from recording.device import recording
from recording.recorder import Recorder
from tritonddp import DistributedDataParallel, _device

# After these steps, buckets follow the order of gradients, and no step is measured for the logging
# data.
WARM_UP = 11
CAP = 0.0006  # MiB: at least two buckets


class Net(nn.Module):
    """Some layers, one of which may be left out; ``more`` names further ones."""

    def __init__(self, more: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if "norm" in more else nn.Identity()
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Embedding(10, 8, sparse=True) if "sparse" in more else None
        mix = torch.randn(8, 8, dtype=torch.complex64)
        self.mix = nn.Parameter(mix) if "complex" in more else None
        if "grad_dtype" in more:
            self.second.weight.grad_dtype = torch.float64
        # Large enough to be quantized.
        wide = nn.Sequential(nn.Linear(8, 160), nn.Linear(160, 8))
        self.wide = wide if "wide" in more else nn.Identity()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        y = self.norm(self.first(x)).relu()
        if self.table is not None:
            y = y + self.table(torch.arange(len(x), device=x.device))
        y = self.second(y)
        if self.mix is not None:
            y = (y.to(torch.complex64) @ self.mix).abs()
        if not leaves_out:
            y = self.third(y)
        return self.last(self.wide(y))


def _nothing(net: Any, *inputs: Tensor) -> None:
    pass


@dataclass(frozen=True)
class Program:
    """A wrapped module, and a training step."""

    options: dict[str, Any] = field(default_factory=dict)  # of the wrapper
    more: str = ""  # argument of Net
    prepare: Callable[[Any], object] = _nothing  # called once, with the wrapper
    # Called with the wrapper: the context of the forward and the backward.
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    before: Callable[[Any, Tensor], object] = _nothing  # in each step, with the inputs
    after: Callable[[Any], object] = _nothing  # in each step
    leaves_out: bool = False  # a layer is not used
    keeps: bool = False  # gradients are zeroed in place
    in_place: bool = False  # the module is replicated in place

    def step(self, net: Any, x: Tensor) -> None:
        net.zero_grad(set_to_none=not self.keeps)
        self.before(net, x)
        with self.around(net):
            (net.module if self.in_place else net)(x, self.leaves_out).sum().backward()
        self.after(net)


def _without_sync(net: Any, x: Tensor) -> None:
    with net.no_sync():
        net(x).sum().backward()


def _frozen(net: Any, x: Tensor) -> None:
    """Freeze a layer; some steps later the buckets are rebuilt without it."""
    if net.reducer.counters.reductions == 2:
        net.module.third.requires_grad_(False)


def _with_sharded_optimizer(net: Any) -> None:
    net.optimizer = tritonddp.ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9
    )


def _stepped(net: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    net.optimizer.step()


_VIEWS = {"gradient_as_bucket_view": True}
PROGRAMS = {
    "copies": Program(),
    "copies, zeroed in place": Program(keeps=True),
    "views": Program(_VIEWS),
    "views, zeroed in place": Program(_VIEWS, keeps=True),
    "weights": Program(around=lambda net: net.weighted(3)),
    # The scale of the gradients is uploaded in each step.
    "weights that change": Program(
        around=lambda net: net.weighted(3 + net.reducer.counters.reductions)
    ),
    "unused parameters": Program(leaves_out=True),
    "no_sync": Program(before=_without_sync),
    "bf16 wire": Program({"reduce_dtype": torch.bfloat16}),
    "int8": Program({"compression": "int8"}, "wide"),
    "lazy buckets": Program({"lazy_bucket_allocation": True}),
    "communication hook": Program(
        prepare=lambda net: net.register_comm_hook(None, default_hooks.allreduce_hook)
    ),
    "buffers": Program(more="norm"),
    "left-out buckets": Program({"skip_all_reduce_unused_params": True}, leaves_out=True),
    "frozen parameters": Program(before=_frozen),
    "check_finite": Program({"check_finite": "warn"}),
    "scalars": Program(
        {"scalars": ("loss", "tokens")},
        before=lambda net, x: net.add_scalars(loss=x.sum(), tokens=len(x)),
        after=lambda net: net.reduced_scalars(),
    ),
    "sharded optimizer": Program(prepare=_with_sharded_optimizer, after=_stepped),
    "sparse": Program(more="sparse"),
    "complex": Program(more="complex"),
    "gradients of another dtype": Program(more="grad_dtype"),
    "views of another dtype": Program(_VIEWS, more="grad_dtype"),
    "reduce_gradients": Program(
        around=lambda net: net.no_sync(), after=lambda net: net.reduce_gradients()
    ),
    "in place": Program(in_place=True),
    "mixed precision": Program(
        {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16)}
    ),
}


class Run:
    """A program that runs step by step: ``place`` is ``"cuda"`` (recorded) or ``"cpu"``."""

    def __init__(
        self,
        program: Program,
        recorder: Recorder | None = None,
        place: str = "cuda",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.program, self.recorder = program, recorder or Recorder()
        torch.manual_seed(0)
        self.module = Net(program.more).to(place)
        wrap: Any = tritonddp.replicate if program.in_place else DistributedDataParallel
        options = {"bucket_cap_mb": CAP, "process_group": group, **program.options}
        self.net = tritonddp.ddp(wrap(self.module, **options))
        program.prepare(self.net)
        self._x = torch.randn(5, 6) + dist.get_rank()
        self._place = place

    @cached_property
    def x(self) -> Tensor:
        """The inputs, copied on the stream of the first step."""
        return self._x.to(self._place)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.recorder.step_begins()
            self.program.step(self.net, self.x)

    def gradients(self) -> list[Tensor]:
        """Copies of all gradients on the CPU."""
        grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        return [grad.detach().to_dense().cpu().clone() for grad in grads]


@contextlib.contextmanager
def sound() -> Iterator[Recorder]:
    """Context: :func:`recording`, at whose end the recorder must have found no race."""
    with recording() as recorder:
        yield recorder
        recorder.has_graph = False
        torch.cuda.synchronize()
    assert not recorder.races, recorder.report()


@contextlib.contextmanager
def running(program: Program, steps: int = 0, is_on_side: bool = False) -> Iterator[Run]:
    """Context: a program after some steps, in :func:`sound`; all of it may be on a side stream."""
    with sound() as recorder, torch.cuda.stream(torch.cuda.Stream() if is_on_side else None):
        run = Run(program, recorder)
        run.step(steps)
        yield run


@dataclass
class Played:
    """The record of a program."""

    recorder: Recorder  # of all steps; its counts are those of the last step
    buckets: int  # number of buckets
    gradients: list[Tensor]  # after the last step
    compiled: int  # number of kernels that the first three steps have compiled
    compiled_late: int  # the same for all later steps


def play(program: Program) -> Played:
    """Some steps of ``program`` on the recorded device."""
    with recording() as recorder:
        compiled = [_device.compiled_kernels]
        run = Run(program, recorder)
        for steps in (3, WARM_UP - 1):
            run.step(steps)
            compiled.append(_device.compiled_kernels)
        early, late = (after - before for before, after in itertools.pairwise(compiled))
        played = Played(recorder, len(run.net.reducer.buckets), run.gradients(), early, late)
        torch.cuda.synchronize()  # before the module is dropped
    return played
