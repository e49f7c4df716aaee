"""Streams, events and pinned copies: what the package asks of ``torch.cuda``, in one file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Readback:
    """Brings a small tensor from a GPU to the host, which waits for it later or not at all.

    Pinned memory and events are dear to make: those of the last time serve again.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def start(self, tensor: Tensor) -> None:
        """Copy ``tensor`` as it will be when the current stream comes to this place."""
        copy = self._copy
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()
        assert self._event is not None
        copy.copy_(tensor, non_blocking=True)
        self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The copy, once it is there; it holds until the next :meth:`start`."""
        assert self._copy is not None
        assert self._event is not None
        self._event.synchronize()
        return self._copy


def upload(target: Tensor, host: Tensor) -> None:
    """Copy ``host``, of the CPU, into ``target``, and wait for nothing.

    By a fresh pinned tensor each time: the copy is asynchronous, and writing the next content into
    memory that it still reads would corrupt this one. The caching host allocator reuses a block
    only after the copy that used it. The device side needs no such care: kernels that read the
    former content are ahead of this copy on the same stream.
    """
    if target.device.type == "cpu":
        target.copy_(host)
        return
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    pinned.copy_(host)
    target.copy_(pinned, non_blocking=True)


class SideStreams:
    """A stream of its own on each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def behind_current(self, device: torch.device, *memory: Tensor) -> Iterator[None]:
        """Context: the stream of ``device``, behind what the current one has been given so far.

        Args:
            device: whose stream.
            memory: what is used inside. It may be let go before the stream is through.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        for tensor in memory:
            tensor.record_stream(stream)


class Clock(Protocol):
    """Marks moments now, and tells later how far they lie apart."""

    def stamp(self) -> Any:
        """This moment: on a GPU, when the current stream will have come to this place."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one stamp to another, once :meth:`settle` has been called."""

    def settle(self) -> None:
        """Wait until all stamps are known."""


def clock_of(device: torch.device) -> Clock:
    """The clock of ``device``: the host's for the CPU."""
    return _CudaClock(device) if device.type == "cuda" else _HostClock()


class _HostClock:
    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class _CudaClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


class Moments:
    """Named moments: nanoseconds since 1970 on the host, and CUDA events on a GPU.

    On a GPU an event says when the device will have come to this place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._epoch = time.time_ns() - time.perf_counter_ns()  # that of the host's clock may jump
        self._at: dict[str, int] = {}
        self._events: dict[str, torch.cuda.Event] = {}

    def mark(self, name: str) -> None:
        """It is now."""
        self._at[name] = self._epoch + time.perf_counter_ns()
        if self._device.type == "cuda":
            self._events[name] = torch.cuda.Event(enable_timing=True)
            self._events[name].record(torch.cuda.current_stream(self._device))

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def host(self, name: str) -> int:
        """When the host was there."""
        return self._at[name]

    def have_passed(self) -> bool:
        """Whether the device has come to all of them. Waits for nothing."""
        return all(event.query() for event in self._events.values())

    def wait(self) -> None:
        """Until the device has come to all of them."""
        for event in self._events.values():
            event.synchronize()

    def nanoseconds(self, start: str, end: str) -> int:
        """Nanoseconds from one to the other, zero where it came before."""
        if self._events:
            passed = round(self._events[start].elapsed_time(self._events[end]) * 1e6)
        else:
            passed = self._at[end] - self._at[start]
        return max(0, passed)
