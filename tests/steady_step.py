"""Count the functions that one steady step of a wrapped model calls in the package."""

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
# Steps in which order, buckets and wire formats are chosen, and the logging data are measured.
WARM_UP = 12
# Calls that only the recorded device makes.
_OF_RECORDER = ("__torch_function__", "<lambda>")


@dataclass
class Calls:
    """The calls of one step on this thread.

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
                name = getattr(code, "co_qualname", code.co_name)  # new in Python 3.11
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
    """Parameters whose gradients are ready one after the other, at almost no cost."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for vector in self.vectors:
            x = x * vector
        return x.sum()


@contextlib.contextmanager
def noting(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Context: ``note`` is the profile function, and the garbage collector does not run.

    It would free wrappers of earlier tests, which calls the package. A forward looks for optimizers
    in the backward if an earlier test has imported their module.
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


def steady_step(
    count: int,
    buckets: int,
    size: int,
    is_local: bool = False,
    in_place: bool = False,
    **options: Any,
) -> Counter[tuple[str, str]]:
    """Count the calls of a step of ``count`` parameters in ``buckets`` buckets, on all ranks.

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

    def step(is_local: bool = False) -> None:
        with ddp.no_sync() if is_local else contextlib.nullcontext():
            # In place, all backwards must be called from the same line.
            ddp(inputs).backward()

    for number in range(WARM_UP + 1):
        ddp.zero_grad()
        step(is_local and number == WARM_UP)
    assert len(tritonddp.ddp(ddp).reducer.buckets) == buckets
    ddp.zero_grad()
    found, attend = Calls(), Peers.attend

    def attend_uncounted(self: Peers, *arguments: Any) -> Any:
        """Wait for a late rank on a busy machine."""
        note = sys.getprofile()
        sys.setprofile(None)
        try:
            return attend(self, *arguments)
        finally:
            sys.setprofile(note)

    with mock.patch.object(Peers, "attend", attend_uncounted), noting(found.note):
        step(is_local)
    return found.of_package
