"""The part of ``torch.cuda`` that the package and torch call, on recorded timelines."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from recording.recorder import CUDA, Recorder, Timeline
from tritonddp import _device, _torch

_FAR_BEHIND = 3  # steps


@contextlib.contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """Context: ``torch.cuda`` has one device, which ``recorder`` records."""

    class Stream:
        """See ``torch.cuda.Stream``. Several objects of one stream are equal."""

        def __init__(
            self,
            device: Any = None,
            priority: int = 0,
            *,
            stream_id: int | None = None,
            timeline: Timeline | None = None,
            **_: Any,
        ) -> None:
            if stream_id is not None:
                (timeline,) = (each for each in recorder.streams if each.stream_id == stream_id)
            self.timeline = timeline or recorder.new_stream("side stream")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.timeline, name)

        def record_event(self, event: Any = None) -> Any:
            event = event or torch.cuda.Event()
            event.record(self)
            return event

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.timeline is self.timeline

        def __hash__(self) -> int:
            return hash(self.timeline)

    class Event:
        """See ``torch.cuda.Event``."""

        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self.enable_timing = enable_timing
            self.clock: dict[Timeline, int] = {}
            self.at = 0.0
            self.step = 0

        def record(self, stream: Stream | None = None) -> None:
            timeline = stream.timeline if stream else recorder.current
            recorder.run(timeline, "event")
            self.clock, self.at = dict(timeline.clock), time.perf_counter()
            self.step = recorder.steps

        def wait(self, stream: Stream | None = None) -> None:
            (stream or recorder.current).wait_event(self)

        def synchronize(self) -> None:
            age = recorder.steps - self.step
            recorder.host_waits(self.clock, "an event's synchronize", age)

        def query(self) -> bool:
            """Events of earlier steps are complete."""
            if recorder.capturing:
                recorder.races.append("an event is queried while a CUDA graph is captured")
            if recorder.steps - self.step < _FAR_BEHIND:
                return recorder.host.knows_all(self.clock)
            recorder.host.join(self.clock)
            return True

        def elapsed_time(self, end: Event) -> float:
            assert self.enable_timing
            assert end.enable_timing
            assert recorder.host.knows_all(end.clock), "the event may not be complete"
            return (end.at - self.at) * 1e3

    class CUDAGraph:
        """See ``torch.cuda.CUDAGraph``."""

        def __init__(self, keep_graph: bool = False) -> None:
            self.work: list[Callable[[], object]] = []

        def __del__(self) -> None:
            recorder.has_graph = False

        def replay(self) -> None:
            for each in self.work:
                each()

    @contextlib.contextmanager
    def graph(captured: CUDAGraph, **_: Any) -> Iterator[None]:
        """Run captured work, because its results need memory, and then restore all memory."""
        before = [
            (key, memory, ctypes.string_at(memory.address, memory.nbytes))
            for key, memory in recorder.live.items()
            if not memory.is_pinned
        ]
        recorder.captured = captured.work
        try:
            with recorder.graph():
                yield
        finally:
            recorder.captured = None
            for key, memory, content in before:
                if recorder.live.get(key) is memory:
                    ctypes.memmove(memory.address, content, len(content))

    def stream(chosen: Stream | None) -> Any:
        timeline = chosen.timeline if chosen else recorder.current
        return mock.patch.object(recorder, "current", timeline)

    def synchronize(device: Any = None) -> None:
        clock = {each: each.now for each in recorder.streams}
        recorder.host_waits(clock, "torch.cuda.synchronize")

    def reset_peak(device: Any = None) -> None:
        recorder.peak = recorder.nbytes

    properties = SimpleNamespace(
        name="recorded",
        major=9,
        minor=0,
        gcnArchName="",
        multi_processor_count=132,
        total_memory=2**33,
        L2_cache_size=2**12,  # smaller than most inputs of benchmarks
    )
    fakes = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "stream": stream,
        "synchronize": synchronize,
        "_sleep": lambda cycles: recorder.run(recorder.current, "sleep"),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: recorder.nbytes,
        "max_memory_allocated": lambda device=None: recorder.peak,
        "reset_peak_memory_stats": reset_peak,
        "set_device": lambda device: None,
        "current_stream": lambda device=None: Stream(timeline=recorder.current),
        "default_stream": lambda device=None: Stream(timeline=recorder.default),
        "is_available": lambda: True,
        "host_memory_stats": lambda: {"num_host_alloc": 0},
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: recorder.capturing,
    }
    raw = {
        "raw_current_stream": lambda index: (recorder.current.stream_id, index, CUDA),
        "current_device": lambda: 0,
    }
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        for name, fake in raw.items():
            stack.enter_context(mock.patch.object(_torch, name, fake))
        stack.callback(_device._stream.cache_clear)
        _device._stream.cache_clear()  # streams of another recorder, or of a GPU
        yield
