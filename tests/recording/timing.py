"""What the benchmarks of ``make gpu`` ask of torch beside the package, for a rehearsal.

Times and shares on the recorded device mean nothing. What counts here is that the lines run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.profiler
from torch.autograd import DeviceType
from triton.runtime import interpreter

from recording.recorder import Recorder, Timeline
from tritonddp import _torch


class _Races(list[str]):
    """What a GPU would not do fails at once, where it is; order is looked at elsewhere."""

    def append(self, race: str) -> None:
        if "on the host" in race:
            raise RuntimeError(f"a GPU would fail: {race}")


@contextlib.contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """Context within :func:`~recording.device.recording`: benchmarks find all that they ask for.

    Triton's interpreter takes the tensors of the device for those of the host that they are.
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

    class Profile:
        """See ``torch.profiler.profile``: what is given to the device, and nothing else."""

        def __init__(self, **_: Any) -> None:
            self._launches = 0

        def __enter__(self) -> Profile:
            self._run = recorder.run
            recorder.run = self._count  # type: ignore[method-assign]
            return self

        def __exit__(self, *_: Any) -> None:
            recorder.run = self._run  # type: ignore[method-assign]

        def _count(self, timeline: Timeline, what: str) -> None:
            self._launches += what != "event"
            self._run(timeline, what)

        def events(self) -> list[Any]:
            event = SimpleNamespace(
                device_type=DeviceType.CUDA,
                is_user_annotation=False,
                name="work",
                self_device_time_total=0.0,
            )
            return [event] * self._launches

    fakes = [
        (torch.profiler, "profile", Profile),
        (_torch, "cuda_sleep", torch.cuda._sleep),  # the recorder's, behind a name that was bound
        (torch.cuda.nccl, "version", lambda: (0, 0, 0)),
        (dist, "barrier", barrier),
        (dist, "init_process_group", init_process_group),
        (interpreter.GridExecutor, "__call__", interpret),
        (recorder, "races", _Races()),
        (recorder, "touch", lambda *access: None),  # which takes most of the time
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, fake in fakes:
            stack.enter_context(mock.patch.object(owner, name, fake))
        yield
