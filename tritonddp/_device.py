"""Streams, events and pinned copies on CUDA devices.

The *work* of a stream is everything submitted to it: kernels, copies and waits, which the device
runs later.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import memset
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from tritonddp import _torch
from tritonddp._modes import outside_modes

# Number of kernels that this process has compiled for GPUs.
compiled_kernels = 0


def is_capturing() -> bool:
    """Return True if the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> Any:
    """Return the current stream of ``device``, a GPU."""
    current = _torch.raw_current_stream
    if current is None or device.index is None:
        return torch.cuda.current_stream(device)
    return _stream(current(device.index))


@lru_cache(64)
def _stream(raw: tuple[int, int, int]) -> Any:
    """Return the stream with these numbers. Cached, since torch never destroys its streams."""
    number, index, kind = raw
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)


class Readback:
    """Copies a small tensor from a GPU to the host asynchronously.

    Pinned memory and events are expensive to create, so they are reused.
    """

    def __init__(self) -> None:
        self._copy: Any = None
        self._event: Any = None
        self._kind: Any = None
        self.memory = (0, 0)  # address and bytes of the copy; it holds NaN until it is complete
        self._source: Callable[[], Tensor | None] = NoneType  # last source; weak reference

    def start(self, tensor: Tensor) -> None:
        """Start to copy ``tensor``, which must not hold NaN, on the current stream."""
        if self._source() is not tensor:
            self._prepare(tensor)
        memset(self.memory[0], 0xFF, self.memory[1])  # NaN, in any dtype: see peek()
        self._copy.copy_(tensor, non_blocking=True)
        self._event.record(current_stream(self._kind[2]))

    def _prepare(self, tensor: Tensor) -> None:
        """Prepare to copy a different tensor than the last time."""
        kind = tensor.shape, tensor.dtype, tensor.device
        if kind != self._kind:  # an event belongs to one device
            with outside_modes([tensor]):
                self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()
            self._kind = kind
            self.memory = self._copy.data_ptr(), self._copy.nbytes
        self._source = weakref.ref(tensor)

    def wait(self) -> Tensor:
        """Wait for the copy, and return it; it is valid until the next :meth:`start`."""
        self._event.synchronize()
        return self._copy

    def peek(self) -> Tensor | None:
        """Return the copy if it is complete, else ``None``. Works in a capture: no event query."""
        return None if self._copy.isnan().any() else self._copy


def read_together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return copies of small tensors on the host, with one copy and one wait per device.

    Tensors of a GPU are returned as fp64.
    """
    found = list(tensors)
    started = []
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        readback = Readback()
        readback.start(torch.cat([tensors[place].reshape(-1).double() for place in places]))
        started.append((places, readback))
    for places, readback in started:
        numbers = readback.wait().split([tensors[place].numel() for place in places])
        for place, each in zip(places, numbers, strict=True):
            found[place] = each.view(tensors[place].shape)
    return found


def upload(target: Tensor, host: Tensor) -> Tensor:
    """Copy ``host``, which is on the CPU, into ``target``, without waiting.

    The source of the copy is a new pinned tensor each time: the copy is asynchronous, and the next
    content must not be written into memory that the copy still reads. The caching host allocator
    reuses a block only after the copy that used it. The device side is safe: kernels that read the
    former content precede this copy on the same stream.

    Returns:
        The source. In a capture, it must stay alive and unchanged as long as the graph.
    """
    if target.device.type == "cpu":
        target.copy_(host)
        return host
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    pinned.copy_(host)
    target.copy_(pinned, non_blocking=True)
    return pinned


def uploaded(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``host``, which is on the CPU, on ``device``: see :func:`upload`."""
    target = torch.empty_like(host, device=device)
    upload(target, host)
    return target


def record_use(*memory: Tensor) -> None:
    """Delay the reuse of ``memory``, which is about to be dropped, until this stream has used it.

    Freed memory returns to the stream on which it was allocated. That may not be the current
    stream, since modules are often wrapped on one stream and trained on another.
    """
    for tensor in memory:
        if tensor.is_cuda:
            tensor.record_stream(current_stream(tensor.device))


def is_default(stream: Any) -> bool:
    """Return True if ``stream`` is the default stream of its device."""
    return bool(stream == torch.cuda.default_stream(stream.device))


def join_streams(streams: Iterable[Any], gradients: Iterable[Tensor | None]) -> None:
    """Make the current stream wait for ``streams``, so that its later work may read ``gradients``.

    Gradients may be dropped before the current stream has read them.
    """
    others = [each for each in streams if each != current_stream(each.device)]
    for stream in others:
        current_stream(stream.device).wait_stream(stream)
    if others:
        record_use(*(each for each in gradients if each is not None and not each.is_sparse))


class SideStreams:
    """A side stream for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def behind_current(self, device: torch.device, *memory: Tensor) -> Iterator[None]:
        """Context in which the side stream of ``device`` is current. It waits for current work.

        The tensors in ``memory`` are used inside, and may be dropped before the stream is done.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(current_stream(device))
        with torch.cuda.stream(stream):
            yield
        for tensor in memory:
            tensor.record_stream(stream)


def settle(device: torch.device) -> None:
    """Wait until ``device`` has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stamp:
    """A point in time: on the host, and on a GPU also on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.host = time.perf_counter_ns()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(current_stream(device))

    def has_passed(self) -> bool:
        """Return True if the device has reached this point. Does not wait."""
        return self.event is None or self.event.query()

    def seconds_to(self, end: Stamp) -> float:
        """Return seconds to ``end``, which the device has reached; host time on the CPU."""
        if self.event is None or end.event is None:
            return (end.host - self.host) / 1e9
        return self.event.elapsed_time(end.event) / 1e3


class Moments:
    """Named points in time on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._epoch = time.time_ns() - time.perf_counter_ns()  # taken once: time_ns() may jump
        self._stamps: dict[str, Stamp] = {}

    def mark(self, name: str) -> None:
        """Record the current time under ``name``."""
        self._stamps[name] = Stamp(self._device)

    def __contains__(self, name: str) -> bool:
        return name in self._stamps

    def host(self, name: str) -> int:
        """Return when the host reached this point: nanoseconds since 1970."""
        return self._epoch + self._stamps[name].host

    def have_passed(self) -> bool:
        """Return True if the device has reached all points. Does not wait."""
        return all(each.has_passed() for each in self._stamps.values())

    def nanoseconds(self, start: str, end: str) -> int:
        """Return nanoseconds from ``start`` to ``end``; zero if ``end`` was first."""
        return max(0, round(self._stamps[start].seconds_to(self._stamps[end]) * 1e9))
