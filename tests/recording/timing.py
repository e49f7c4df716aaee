"""What benchmarks ask of ``torch.cuda`` beside the package: facts, memory, graphs, sleeps.

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

from recording.recorder import Memory, Recorder, Timeline

PROPERTIES = SimpleNamespace(
    name="recorded device",
    major=9,
    minor=0,
    gcnArchName="",
    multi_processor_count=132,
    total_memory=2**33,
    L2_cache_size=2**12,  # few inputs exceed it
)


class _Races(list[str]):
    """What a GPU would not do fails at once, where it is; order is looked at elsewhere."""

    def append(self, race: str) -> None:
        if "on the host" in race:
            raise RuntimeError(f"a GPU would fail: {race}")


class _Allocations:
    """Bytes on the device, and their peak."""

    def __init__(self, recorder: Recorder) -> None:
        self._allocated, self._freed = recorder.allocated, recorder.freed
        self.now = self.peak = 0

    def allocated(self, key: int, address: int, nbytes: int, is_pinned: bool = False) -> Memory:
        memory = self._allocated(key, address, nbytes, is_pinned)
        if not is_pinned:
            self.now += nbytes
            self.peak = max(self.peak, self.now)
        return memory

    def freed(self, key: int, memory: Memory) -> None:
        if not memory.is_pinned:
            self.now -= memory.nbytes
        self._freed(key, memory)

    def reset(self, device: Any = None) -> None:
        self.peak = self.now


@contextlib.contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """Context within :func:`~recording.device.recording`: benchmarks find all that they ask for.

    A captured graph has run when it is captured, and a replay does nothing. Triton's interpreter
    takes the tensors of the device for those of the host that they are.
    """
    allocations = _Allocations(recorder)

    class Graph:
        """See ``torch.cuda.CUDAGraph``."""

        def replay(self) -> None:
            pass

    @contextlib.contextmanager
    def graph(_: Graph, *args: Any, **kwargs: Any) -> Iterator[None]:
        with recorder.graph():
            yield

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
            event = SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=False)
            return [event] * self._launches

    own_init, own_barrier = dist.init_process_group, dist.barrier
    own_interpret = interpreter.GridExecutor.__call__
    fakes = [
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "_sleep", lambda cycles: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "get_device_properties", lambda device=None: PROPERTIES),
        (torch.cuda, "graph", graph),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "max_memory_allocated", lambda device=None: allocations.peak),
        (torch.cuda, "memory_allocated", lambda device=None: allocations.now),
        (torch.cuda, "reset_peak_memory_stats", allocations.reset),
        (torch.cuda, "set_device", lambda device: None),
        (torch.profiler, "profile", Profile),
        (torch.cuda.nccl, "version", lambda: (0, 0, 0)),
        (dist, "barrier", barrier),
        (dist, "init_process_group", init_process_group),
        (interpreter.GridExecutor, "__call__", interpret),
        (recorder, "races", _Races()),
        (recorder, "touch", lambda *access: None),  # which takes most of the time
        (recorder, "allocated", allocations.allocated),
        (recorder, "freed", allocations.freed),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, fake in fakes:
            stack.enter_context(mock.patch.object(owner, name, fake))
        yield
