"""The context that records a timeline.

Nothing of it is there outside the context: its hooks and its wrapper around the reduction are put
in when the context is entered and taken out when it is left. What remains is one attribute of the
reducer, looked at once a backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonddp._torch import register_post_accumulate_grad_hook
from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.agreement import Ballot
from tritonddp.coordination.collectives import Work
from tritonddp.ddp import DistributedDataParallel
from tritonddp.diagnostics.timeline import Backward, BucketPass, Gradient, Interval, Timeline
from tritonddp.features.optimizer_in_backward import SteppingReduction
from tritonddp.reducer.reducer import Reducer
from tritonddp.reducer.state import Phase


@contextmanager
def trace(module: DistributedDataParallel) -> Iterator[Timeline]:
    """Context: record every backward of ``module`` that begins inside.

    Results, launches and collectives are those of a run without it. On the CPU times are the
    host's (``time.perf_counter``). On a GPU they are the device's, from CUDA events, and leaving
    the context waits for the device. Each rank records its own; a rank may trace alone.

    It takes time itself: a Python hook a gradient, and some calls a bucket. On the CPU what a
    thread does not do because others have the cores belongs to whatever it was doing.

    Args:
        module: the wrapped module. Its parameters are on one device.

    Yields:
        What is recorded; its list of backwards is filled when the context is left.

    Raises:
        NotImplementedError: the module's parameters are on several devices.
        RuntimeError: the module is being traced already.
        TypeError: ``module`` is something else.

    Example::

        with tritonddp.trace(model) as timeline:
            loss(model(inputs), targets).backward()
        print(f"{timeline.backwards[0].exposed * 1e3:.2f} ms of communication were exposed")
        timeline.save_chrome_trace("step.trace.json")
    """
    if not isinstance(module, DistributedDataParallel):
        raise TypeError(
            "trace() takes the module that tritonddp.DistributedDataParallel(...) made, got "
            f"{type(module).__module__}.{type(module).__qualname__}"
        )
    if module.is_multi_device_module:
        devices = sorted({str(param.device) for param in module.parameters()})
        raise NotImplementedError(
            "trace() measures by the clock of one device, and the parameters of this module are "
            f"on {', '.join(devices)}"
        )
    if module.reducer.is_traced:
        raise RuntimeError(
            "this module is being traced already: leave the first trace() before the next"
        )
    timeline = Timeline(module.process_group.rank(), str(module.device))
    recorder = _Recorder(
        module.reducer, _CudaClock(module.device) if module.device.type == "cuda" else _HostClock()
    )
    try:
        recorder.attach()
        yield timeline
    finally:
        recorder.detach()
        timeline.backwards.extend(recorder.backwards())


class _Clock(Protocol):
    """Marks moments now, and tells later how far they lie apart."""

    def stamp(self) -> Any:
        """This moment: on a GPU, when the current stream will have come to this place."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one stamp to another, once :meth:`settle` has been called."""

    def settle(self) -> None:
        """Wait until all stamps are known."""


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


@dataclass
class _BucketStamps:
    """The stamps of one bucket in one backward, as they come."""

    flattens: list[tuple[Any, Any]] = field(default_factory=list)
    launched: Any = None
    completed: Any = None
    waited: Any = None
    unflattened: Any = None


@dataclass
class _Record:
    """The stamps of one backward, as they come.

    Buckets are described by their numbers and names: to keep the buckets themselves would keep
    the memory of those that are replaced after the first backward.
    """

    began: Any
    reduced: bool
    first: bool
    names: list[tuple[str, ...]]  # per bucket
    nbytes: list[int]  # per bucket
    buckets: list[_BucketStamps]
    gradients: list[tuple[str, Any]] = field(default_factory=list)
    compute_ended: Any = None
    ended: Any = None


class _Recorder:
    """Takes the stamps of one reducer's backwards."""

    def __init__(self, reducer: Reducer, clock: _Clock) -> None:
        self._reducer = reducer
        self._clock = clock
        self._reduction = reducer._reduction
        self._handles: list[Any] = []
        self._records: list[_Record] = []
        self._running: _Record | None = None
        self._unfinished: _Record | None = None  # over, but for finalize_backward()
        self._early: list[tuple[str, Any]] = []  # gradients of a backward that has not begun

    def attach(self) -> None:
        reducer = self._reducer
        # The reducer's own hooks of this kind only count: it flattens in a later hook.
        for name, param in zip(reducer.placement.names, reducer.placement.params, strict=True):
            if param.requires_grad:  # it may have been frozen since
                hook = register_post_accumulate_grad_hook(param, self._gradient_hook(name))
                self._handles.append(hook)
        self._traced = _TracedReduction(self._reduction, self._clock, self._stamps_of)
        reducer._reduction = self._traced
        reducer.on_backward.append(self._backward_begins)
        reducer.is_traced = True
        self._entered = self._clock.stamp()

    def detach(self) -> None:
        self._reducer.is_traced = False
        self._reducer.on_backward.remove(self._backward_begins)
        if self._reducer._reduction is self._traced:
            self._reducer._reduction = self._reduction
        else:  # optimizers that step in the backward came meanwhile
            assert isinstance(self._reducer._reduction, SteppingReduction)
            self._reducer._reduction.inner = self._reduction
        for handle in self._handles:
            handle.remove()

    def backwards(self) -> Iterator[Backward]:
        """All that began since :meth:`attach`."""
        self._clock.settle()
        return map(self._backward, self._records)

    def _backward_begins(self, end: Callable[[], None]) -> Callable[[], None]:
        """The reducer is about to queue ``end`` for the end of a new backward."""
        reducer = self._reducer
        reduced = reducer._reduces
        buckets = reducer.buckets
        record = _Record(
            began=self._clock.stamp(),
            reduced=reduced,
            first=reduced and reducer.arrangement.is_provisional,
            names=[tuple(bucket.names) for bucket in buckets],
            nbytes=[bucket.nbytes for bucket in buckets],
            buckets=[_BucketStamps() for _ in buckets],
        )
        record.gradients.extend(self._early)
        self._early.clear()
        self._records.append(record)
        self._running = record

        def traced_end() -> None:
            record.compute_ended = self._clock.stamp()
            end()
            record.ended = self._clock.stamp()
            self._running, self._unfinished = None, record

        return traced_end

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        """Hook of parameter ``name``, called when a gradient has been accumulated."""

        def gradient_ready(_: Tensor) -> None:
            stamp = name, self._clock.stamp()
            if self._running is not None:
                self._running.gradients.append(stamp)
            else:
                # No output showed the start of this backward: the reducer's own hook, which comes
                # after this one, begins it.
                self._early.append(stamp)

        return gradient_ready

    def _stamps_of(self, bucket: Bucket) -> _BucketStamps:
        # A backward that began before the trace, or a bucket made for one reduction on request.
        record = self._running
        if record is None and self._reducer._phase is Phase.REDUCING:  # in finalize_backward()
            record = self._unfinished
        if record is None or bucket not in self._reducer.buckets:
            return _BucketStamps()
        return record.buckets[bucket.index]

    def _backward(self, record: _Record) -> Backward:
        # Counted from the backward's own start: the clock of CUDA events gets coarse with time.
        began = self._clock.seconds(self._entered, record.began)

        def at(stamp: Any) -> float:
            return began + self._clock.seconds(record.began, stamp)

        bucket_of = {name: index for index, names in enumerate(record.names) for name in names}
        gradients = tuple(
            Gradient(name, bucket_of[name], at(stamp)) for name, stamp in record.gradients
        )
        if record.ended is None:
            ended = gradients[-1].ready if gradients else began
            return Backward(
                began, ended, ended, record.reduced, record.first, True, gradients, buckets=()
            )
        buckets = []
        for index, stamps in enumerate(record.buckets if record.reduced else ()):
            if stamps.unflattened is None:
                continue  # it was left out, or finalize_backward() comes after the trace
            waited = at(stamps.waited)
            # Whoever stamps the completion may come a moment after whoever waited for it.
            completed = waited if stamps.completed is None else min(at(stamps.completed), waited)
            buckets.append(
                BucketPass(
                    index,
                    record.nbytes[index],
                    record.names[index],
                    flattens=tuple(Interval(at(a), at(b)) for a, b in stamps.flattens),
                    launched=at(stamps.launched),
                    completed=completed,
                    unflatten=Interval(waited, at(stamps.unflattened)),
                )
            )
        compute_ended = at(record.compute_ended)
        ended = max([at(record.ended), *(each.unflatten.ended for each in buckets)])
        return Backward(
            began,
            compute_ended,
            ended if record.reduced else compute_ended,
            record.reduced,
            record.first,
            False,
            gradients,
            tuple(buckets),
        )


class _TracedReduction:
    """A reduction that does what ``inner`` does, and stamps it."""

    def __init__(
        self, inner: Reduction, clock: _Clock, stamps_of: Callable[[Bucket], _BucketStamps]
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._stamps_of = stamps_of

    @property
    def plain(self) -> Reduction:
        plain = self._inner.plain
        return self if plain is self._inner else plain

    def get_unit(self) -> float:
        return self._inner.get_unit()

    def set_unit(self, unit: float) -> None:
        self._inner.set_unit(unit)

    def begin(self, ballot: Ballot, scale: float) -> None:
        self._inner.begin(ballot, scale)

    def settle(self) -> None:
        self._inner.settle()

    def fill(self, bucket: Bucket, segment: Segment, used: Sequence[bool]) -> None:
        began = self._clock.stamp()
        self._inner.fill(bucket, segment, used)
        self._stamps_of(bucket).flattens.append((began, self._clock.stamp()))

    def start(self, bucket: Bucket) -> Work:
        stamps = self._stamps_of(bucket)
        stamps.launched = self._clock.stamp()
        work = self._inner.start(bucket)

        # gloo's threads call this when the result is there. NCCL's future calls it at once, on a
        # stream that waits for the collective: there the stamp is an event behind it.
        def completed(_: Any) -> None:
            stamps.completed = self._clock.stamp()

        work.get_future().add_done_callback(completed)
        return _TracedWork(work, self._clock, stamps)

    def start_poisoned(self, bucket: Bucket) -> Work:
        return self._inner.start_poisoned(bucket)

    def discard(self, bucket: Bucket, work: Work) -> None:
        self._inner.discard(bucket, work)

    def finish(self, bucket: Bucket, work: Work) -> None:
        self._inner.finish(bucket, work)
        self._stamps_of(bucket).unflattened = self._clock.stamp()


class _TracedWork:
    """A collective under way; stamps when it has been waited for."""

    def __init__(self, inner: Work, clock: _Clock, stamps: _BucketStamps) -> None:
        self._inner = inner
        self._clock = clock
        self._stamps = stamps

    def wait(self) -> object:
        result = self._inner.wait()
        self._stamps.waited = self._clock.stamp()
        return result

    def get_future(self) -> Any:
        return self._inner.get_future()
