"""Run a script on the recorded device: python tests/recording/rehearse.py SCRIPT ARGS

Or a module: ``-m MODULE ARGS``.

For benchmarks of ``make gpu``. Models, lists of parameters and buckets are small, but keep their
names, so command lines are the same as on a GPU. There are few rounds. Times have no meaning: only
the code is tested. A tensor that a benchmark creates without a device is on the host, and an
operation with tensors on the host and on the device fails, as on a GPU.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
sys.path.pop(0)  # this folder: its modules have the names of other modules
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed
import torch.profiler
from torch import Tensor, nn
from torch.autograd import DeviceType
from triton.runtime import interpreter

from recording import device
from recording.recorder import Recorder

STOCK = torch.nn.parallel.distributed.__file__
TORCH = str(Path(torch.__file__).parent)
ROUNDS = 2
SHAPES = ((8, 5), (3,), (16, 16), (2100,))  # the last one makes two chunks


class _InStock:
    """True while the C++ code of stock DDP creates its buckets: its tensors are on the CPU."""

    def __bool__(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == STOCK or frame.f_code.co_name == "_engine_run_backward":
                return True
            if not name.startswith((TORCH, __file__, str(Path(__file__).parent))):
                return False
            frame = frame.f_back
        return False


class _Races(list[str]):
    """An operation that would fail on a GPU raises immediately. Other tests check the order."""

    def append(self, race: str) -> None:
        if "on the host" in race:
            raise RuntimeError(f"a GPU would fail: {race}")


@contextlib.contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """Context inside :func:`~recording.device.recording`: functions of torch for benchmarks.

    Triton's interpreter treats the tensors of the device as tensors of the host.
    """
    own_init, own_barrier = dist.init_process_group, dist.barrier
    own_interpret = interpreter.GridExecutor.__call__

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        own_init("gloo" if backend == "nccl" else backend, *args, **kwargs)

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return own_barrier(group, async_op)

    def interpret(executor: Any, *args: Any, **kwargs: Any) -> Any:
        modes = torch.utils._python_dispatch._disable_current_modes()
        with torch._C.DisableTorchFunction(), modes:
            return own_interpret(executor, *args, **kwargs)

    kernel = SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=False)
    profiler = SimpleNamespace(events=lambda: [kernel])
    fakes = [
        (torch.profiler, "profile", lambda **_: contextlib.nullcontext(profiler)),
        (torch.cuda.nccl, "version", lambda: (0, 0, 0)),
        (dist, "barrier", barrier),
        (dist, "init_process_group", init_process_group),
        (interpreter.GridExecutor, "__call__", interpret),
        (recorder, "races", _Races()),
        (recorder, "touch", lambda *access: None),  # it would take most of the time
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, fake in fakes:
            stack.enter_context(mock.patch.object(owner, name, fake))
        yield


def make_small() -> None:
    """Shrink the benchmarks. Their modules query the device when they are imported."""
    from benchmarks.base import deadline
    from benchmarks.host import subjects
    from benchmarks.kernels import shapes
    from benchmarks.models import cases
    from benchmarks.step import plan

    shapes.whole = lambda name: SHAPES
    shapes.LISTS = ("many_small",)  # since all are equal here
    shapes.BUCKETS["25MiB"] = lambda given, dtype: given[:2]
    for name, case in list(cases.CASES.items()):
        cases.CASES[name] = cases.Case(name, _model, _batch, (2, 4), case.unused)
    plan.DISCARDED["cuda"] = subjects.WARMUPS = 1
    subjects.PARAMETERS, subjects.PER_BUCKET = 24, 6
    rounds = deadline.rounds

    def few(most: int, *args: Any, **kwargs: Any) -> Iterator[int]:
        return rounds(min(most, ROUNDS), *args, **kwargs)

    deadline.rounds = few


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))


def _batch(generator: torch.Generator, examples: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn((2, examples, 6), generator=generator))  # type: ignore[return-value]


def main() -> int:
    script, *arguments = sys.argv[1:]
    run = runpy.run_path
    if script == "-m":
        run, (script, *arguments) = runpy.run_module, arguments
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    status = 0
    with device.recording(_InStock()) as recorder, patched(recorder):  # type: ignore[arg-type]
        make_small()
        try:
            run(script, run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
