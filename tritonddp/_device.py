"""Streams, events and pinned copies: what the package asks of ``torch.cuda``, in one file."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from tritonddp import _torch


def is_capturing() -> bool:
    """Whether what the current stream is given goes into a CUDA graph, and runs in its replays."""
    return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> Any:
    """That of ``device``, a GPU."""
    current = _torch.raw_current_stream
    if current is None or device.index is None:
        return torch.cuda.current_stream(device)
    return _stream(current(device.index))


@lru_cache(64)
def _stream(raw: tuple[int, int, int]) -> Any:
    """The stream of these numbers: always the same, as torch destroys none of its own."""
    number, index, kind = raw
    return torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Context: ``stream`` is the current one, as in ``torch.cuda.stream``."""
    has_raw = _torch.raw_set_stream is not None and _torch.raw_current_stream is not None
    if has_raw and stream.device_index == _torch.current_device():
        return _OnStream(stream)
    return torch.cuda.stream(stream)


class _OnStream:
    """:func:`on_stream` for a stream of the current device, which stays that."""

    __slots__ = ("_former", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._former = _torch.raw_current_stream(stream.device_index)
        _torch.raw_set_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        _torch.raw_set_stream(*self._former)


class Readback:
    """Brings a small tensor from a GPU to the host, which waits for it later or not at all.

    Pinned memory and events are dear to make: those of the last time serve again.
    """

    def __init__(self) -> None:
        self._copy: Any = None
        self._event: Any = None
        self._kind: Any = None
        self._stream: Any = None
        self._source: Callable[[], Tensor | None] = NoneType  # of the last copy, not kept alive

    def start(self, tensor: Tensor, work: Any = None) -> None:
        """Copy ``tensor``, which holds no NaN, as it is when the current stream comes here.

        With ``work``, a collective, as that leaves it: on a stream of its own, which waits for
        nothing else that the current one has been given. Nobody may write to ``tensor`` before
        :meth:`keep_order`, or until :meth:`wait` has returned.
        """
        is_new = self._source() is not tensor
        if is_new:
            self._prepare(tensor)
        copy, event = self._copy, self._event
        copy.fill_(torch.nan)  # see peek()
        if work is None:
            copy.copy_(tensor, non_blocking=True)
            event.record(current_stream(self._kind[2]))
            return
        stream = self._stream
        if stream is None:
            stream = self._stream = torch.cuda.Stream(self._kind[2])
            is_new = True
        if is_new:  # once holds for as long as its memory is there
            tensor.record_stream(stream)
        with on_stream(stream):
            work.wait()
            copy.copy_(tensor, non_blocking=True)
            event.record(stream)

    def _prepare(self, tensor: Tensor) -> None:
        """Another tensor than the last time is to be copied."""
        kind = tensor.shape, tensor.dtype, tensor.device
        if kind != self._kind:  # an event belongs to one device
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()
            self._stream = None
            self._kind = kind
        self._source = weakref.ref(tensor)

    def keep_order(self) -> None:
        """What the current stream of the device is given from now on is behind the copy."""
        self._event.wait(current_stream(self._kind[2]))

    def wait(self) -> Tensor:
        """The copy, once it is there; it holds until the next :meth:`start`."""
        self._event.synchronize()
        return self._copy

    def peek(self) -> Tensor | None:
        """The copy if it is there, which the device, in a capture, cannot be asked."""
        return None if self._copy.isnan().any() else self._copy


def read_together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Some small tensors on the host, with their shapes: by one copy and one wait a device.

    Those of a GPU come as fp64.
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
    """Copy ``host``, of the CPU, into ``target``, and wait for nothing.

    Returns what is copied: in a capture it has to live, and stay as it is, as long as the graph.

    By a fresh pinned tensor each time: the copy is asynchronous, and writing the next content into
    memory that it still reads would corrupt this one. The caching host allocator reuses a block
    only after the copy that used it. The device side needs no such care: kernels that read the
    former content are ahead of this copy on the same stream.
    """
    if target.device.type == "cpu":
        target.copy_(host)
        return host
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    pinned.copy_(host)
    target.copy_(pinned, non_blocking=True)
    return pinned


def uploaded(host: Tensor, device: torch.device) -> Tensor:
    """A copy of ``host``, of the CPU, on ``device``: see :func:`upload`."""
    target = torch.empty_like(host, device=device)
    upload(target, host)
    return target


def let_go(*memory: Tensor) -> None:
    """These are dropped: what the current stream still does with them comes to its end before.

    Memory goes back to the stream that it was allocated on, which may be another one: modules are
    wrapped on one stream and trained on another.
    """
    for tensor in memory:
        if tensor.is_cuda:
            tensor.record_stream(current_stream(tensor.device))


def is_default(stream: Any) -> bool:
    """Whether ``stream`` is its device's default one."""
    return bool(stream == torch.cuda.default_stream(stream.device))


def follow(streams: Iterable[Any], gradients: Iterable[Tensor | None]) -> None:
    """What is given from now on comes behind ``streams``, and may read ``gradients``.

    Those may be let go before the current stream is through with them.
    """
    others = [each for each in streams if each != current_stream(each.device)]
    for stream in others:
        current_stream(stream.device).wait_stream(stream)
    if others:
        let_go(*(each for each in gradients if each is not None and not each.is_sparse))


class SideStreams:
    """A stream of its own on each device.

    Args:
        priority: of what they are given; -1 goes before what other streams are given.
    """

    def __init__(self, priority: int = 0) -> None:
        self._priority = priority
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def behind_current(self, device: torch.device, *memory: Tensor) -> Iterator[None]:
        """Context: the stream of ``device``, behind what the current one has been given so far.

        Args:
            device: whose stream.
            memory: what is used inside. It may be let go before the stream is through.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=self._priority)
        stream = self._streams[device]
        stream.wait_stream(current_stream(device))
        with on_stream(stream):
            yield
        for tensor in memory:
            tensor.record_stream(stream)


class Milestone:
    """How far a stream of one device has been given work, for other streams to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """It is here, on the current stream."""
        self._event.record(current_stream(self.device))

    def wait(self) -> None:
        """What the current stream is given from now on comes behind it."""
        self._event.wait(current_stream(self.device))

    def get_future(self) -> torch.futures.Future[None]:
        """As NCCL's: what is chained to it runs at once, on a stream that is behind this."""
        return _Future(self)


class _Future(torch.futures.Future[None]):
    def __init__(self, milestone: Milestone) -> None:
        super().__init__()
        self._milestone = milestone
        self.set_result(None)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[None]], None]) -> None:
        with on_stream(torch.cuda.Stream(self._milestone.device)):
            self._milestone.wait()
            callback(self)


def settle(device: torch.device) -> None:
    """Wait until ``device`` is through with all that it has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stamp:
    """This moment on the host and, on a GPU, when its current stream will have come here."""

    def __init__(self, device: torch.device) -> None:
        self.host = time.perf_counter_ns()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(current_stream(device))

    def has_passed(self) -> bool:
        """Whether the device has come here. Waits for nothing."""
        return self.event is None or self.event.query()

    def seconds_to(self, end: Stamp) -> float:
        """Of the device, which has come to both by now; on the CPU of the host."""
        if self.event is None or end.event is None:
            return (end.host - self.host) / 1e9
        return self.event.elapsed_time(end.event) / 1e3


class Moments:
    """Named moments of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._epoch = time.time_ns() - time.perf_counter_ns()  # that of the host's clock may jump
        self._stamps: dict[str, Stamp] = {}

    def mark(self, name: str) -> None:
        """It is now."""
        self._stamps[name] = Stamp(self._device)

    def __contains__(self, name: str) -> bool:
        return name in self._stamps

    def host(self, name: str) -> int:
        """When the host was there: nanoseconds since 1970."""
        return self._epoch + self._stamps[name].host

    def have_passed(self) -> bool:
        """Whether the device has come to all of them. Waits for nothing."""
        return all(each.has_passed() for each in self._stamps.values())

    def wait(self) -> None:
        """Until the device has come to all of them."""
        for each in self._stamps.values():
            if each.event is not None:
                each.event.synchronize()

    def nanoseconds(self, start: str, end: str) -> int:
        """Nanoseconds from one to the other, zero where it came before."""
        return max(0, round(self._stamps[start].seconds_to(self._stamps[end]) * 1e9))
