"""What one steady step of a wrapped model calls in the package: functions and files, counted."""

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

import tritonddp
from tritonddp import DistributedDataParallel
from tritonddp.coordination.host.peers import Peers

LIBRARY = str(Path(tritonddp.__file__).parent)
# Until then order, buckets and wires are chosen, and steps are measured for the logging data.
WARM_UP = 12


# Calls that only the recorded device makes.
_OF_RECORDER = ("__torch_function__", "<lambda>")


@dataclass
class Calls:
    """Of one step, on this thread.

    Attributes:
        of_package: functions of the package, by file and name.
        of_others: functions of torch and C that the package calls, by file, line and name.
    """

    of_package: Counter[tuple[str, str]] = field(default_factory=Counter)
    of_others: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """For ``sys.setprofile``."""
        code = frame.f_code
        if event == "call":
            if code.co_filename.startswith(LIBRARY):
                name = getattr(code, "co_qualname", code.co_name)  # of Python 3.11
                self.of_package[code.co_filename[len(LIBRARY) + 1 :], name] += 1
                return
            caller = frame.f_back
            name = code.co_name
        elif event == "c_call":
            caller, name = frame, getattr(argument, "__qualname__", str(argument))
        else:
            return
        if caller is not None and caller.f_code.co_filename.startswith(LIBRARY):
            file = caller.f_code.co_filename[len(LIBRARY) + 1 :]
            if name not in _OF_RECORDER:
                self.of_others[file, caller.f_lineno, name] += 1


class Vectors(nn.Module):
    """Parameters whose gradients come one after the other, at next to no cost."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for vector in self.vectors:
            x = x * vector
        return x.sum()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Context: what runs inside is none of the package's work."""
    note = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(note)


@contextlib.contextmanager
def noting(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Context: ``note`` is the profile function, and nobody frees what was left before.

    Wrappers of earlier tests are freed by the garbage collector, and that calls the package. And
    each forward looks for optimizers in the backward if an earlier test has imported their module.
    """
    gc.collect()
    gc.disable()
    with mock.patch.dict(sys.modules):
        sys.modules.pop("torch.distributed.optim.apply_optimizer_in_backward", None)
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()


def calls(function: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Calls of functions of the package on this thread, by file and name."""
    found = Calls()
    with noting(found.note):
        function()
    return found.of_package


def steady_step(
    count: int,
    buckets: int,
    size: int,
    is_local: bool = False,
    in_place: bool = False,
    **options: Any,
) -> Counter[tuple[str, str]]:
    """What a step of ``count`` parameters in so many buckets calls; on all ranks at once.

    Args:
        size: elements of a parameter.
        is_local: the step runs under ``no_sync``.
        in_place: the model is replicated in place, not wrapped.
        options: of the wrapper.
    """
    cap = size * 4 * count / buckets / 2**20
    wrap: Any = tritonddp.replicate if in_place else DistributedDataParallel
    ddp = wrap(Vectors(count, size), bucket_cap_mb=cap, **options)
    inputs = torch.ones(size)

    def step() -> None:
        with ddp.no_sync() if is_local else contextlib.nullcontext():
            ddp(inputs).backward()

    for _ in range(WARM_UP):
        ddp.zero_grad()
        if in_place:  # in the same line as the step that is counted
            step()
        else:
            ddp(inputs).backward()
    assert len(tritonddp.ddp(ddp).reducer.buckets) == buckets
    if is_local:
        step()
    ddp.zero_grad()
    attend = Peers.attend

    def attend_uncounted(self: Peers, *arguments: Any) -> Any:
        # What a rank does while it waits for a late one, on a busy machine.
        with uncounted():
            return attend(self, *arguments)

    with mock.patch.object(Peers, "attend", attend_uncounted):
        return calls(step)
