"""``trace()``, the context that records a timeline. It installs its hooks only while it is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tritonddp._device import Stamp, settle
from tritonddp._torch import register_post_accumulate_grad_hook
from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.reduction import Reduction
from tritonddp.diagnostics.timeline import Backward, BucketPass, Gradient, Interval, Timeline
from tritonddp.reducer import capture
from tritonddp.reducer.extension import Events, Extension
from tritonddp.reducer.graph import backward as graph
from tritonddp.reducer.reducer import Reducer


@contextmanager
def trace(module: nn.Module) -> Iterator[Timeline]:
    """Context: record every backward of ``module`` that begins inside.

    It does not change results, launches or collectives. On the CPU times come from the host's clock
    (``time.perf_counter``). On a GPU they come from CUDA events, and leaving the context waits for
    the device. Each rank records its own times; a rank may trace alone.

    Tracing takes time itself: a Python hook for each gradient, and some calls for each bucket. On
    the CPU, time in which a thread waits for a core counts as time of what the thread was doing.

    Args:
        module: the wrapped module. Its parameters are on one device.

    Yields:
        The timeline; its list of backwards is filled when the context is left.

    Raises:
        NotImplementedError: the module's parameters are on several devices.
        RuntimeError: the module is being traced already.
        TypeError: ``module`` was not wrapped with tritonddp.

    Example::

        with tritonddp.trace(model) as timeline:
            loss_function(model(inputs), targets).backward()
        print(f"{timeline.backwards[0].exposed * 1e3:.2f} ms of communication were exposed")
        timeline.save_chrome_trace("step.trace.json")
        everybody = timeline.gather()  # on all ranks
        timeline.save_chrome_trace("ranks.trace.json", everybody)
    """
    reducer = getattr(getattr(module, "_ddp_state", None), "core", None)
    if not isinstance(reducer, Reducer):
        raise TypeError(
            "trace() takes the module that tritonddp.DistributedDataParallel(...) made, got "
            f"{type(module).__module__}.{type(module).__qualname__}"
        )
    buckets, events, group = reducer.manager.current, reducer.events, reducer.group
    devices = sorted({str(param.device) for param in buckets.params})
    if len(devices) > 1:
        raise NotImplementedError(
            "trace() measures by the clock of one device, and the parameters of this module are "
            f"on {', '.join(devices)}"
        )
    if any(isinstance(each, _Recorder) for each in events.extensions):
        raise RuntimeError(
            "this module is being traced already: leave the first trace() before the next"
        )
    message = "a replay records no times: trace a step without a graph"
    capture.refuse(buckets, reducer.where(), message)
    device = buckets.params[0].device
    recorder = _Recorder(device, events)
    timeline = Timeline(group.rank, str(device), [], recorder.entered.host / 1e9, group)
    try:
        recorder.attach(buckets)
        yield timeline
    finally:
        recorder.detach()
        timeline.backwards.extend(recorder.backwards())


@dataclass
class _BucketStamps:
    """The time stamps of one bucket in one backward.

    The bucket is identified by the names of its parameters. A reference to it would keep its memory
    alive when buckets are rebuilt after the first backward.
    """

    names: tuple[str, ...] = ()
    nbytes: int = 0
    flatten_began: Any = None
    flattens: list[tuple[Any, Any]] = field(default_factory=list)
    launched: Any = None
    completed: Any = None
    waited: Any = None
    unflattened: Any = None


@dataclass
class _Record:
    """The time stamps of one backward."""

    began: Any
    reduced: bool
    first: bool
    buckets: list[_BucketStamps]
    gradients: list[tuple[str, Any]]
    compute_ended: Any = None
    ended: Any = None  # None if the backward broke off


class _Recorder(Extension):
    """Takes the time stamps of one reducer's backwards."""

    reads_device = "when gradients are ready and buckets are reduced (trace)"

    def __init__(self, device: torch.device, events: Events) -> None:
        self._device = device
        self.entered = self._now()
        self._events = events
        self._handles: list[Any] = []
        self._records: list[_Record] = []
        self._record: _Record | None = None  # of the backward that runs, or waits for its end
        self._reduction: Reduction | None = None  # of this record
        self._early: list[tuple[str, Any]] = []  # gradients of a backward that has not begun

    def attach(self, buckets: BucketSet) -> None:
        # The reducer flattens in a hook that runs after this one, so ready comes before flatten.
        for name, param in zip(buckets.names, buckets.params, strict=True):
            if param.requires_grad:  # it may have been frozen since the buckets were built
                ready = partial(self._gradient_ready, name)
                hook = register_post_accumulate_grad_hook(param, ready)
                self._handles.append(hook)
        self._events.install(self)

    def detach(self) -> None:
        self._events.remove(self)
        for handle in self._handles:
            handle.remove()
        self._record = self._reduction = None

    def backwards(self) -> list[Backward]:
        """All backwards that began since :meth:`attach`."""
        settle(self._device)
        return [self._backward(record) for record in self._records]

    def on_begin(self, backward: graph.Backward) -> None:
        reduction, buckets = backward.reduction, backward.bucket_set.buckets
        self._record = _Record(
            began=self._now(),
            reduced=reduction is not None,
            first=backward.is_provisional and reduction is not None,
            buckets=[_BucketStamps(tuple(each.names), each.nbytes) for each in buckets],
            gradients=self._early,
        )
        self._early = []
        self._records.append(self._record)
        self._reduction = reduction

    def on_pack(self, reduction: Reduction, bucket: Bucket, segment: Segment) -> None:
        self._stamps(reduction, bucket).flatten_began = self._now()

    def on_packed(self, reduction: Reduction, bucket: Bucket) -> None:
        stamps = self._stamps(reduction, bucket)
        stamps.flattens.append((stamps.flatten_began, self._now()))

    def on_launch(self, reduction: Reduction, bucket: Bucket) -> None:
        self._stamps(reduction, bucket).launched = self._now()

    def on_launched(self, reduction: Reduction, bucket: Bucket, work: Any) -> None:
        if reduction is not self._reduction:
            return
        stamps = self._stamps(reduction, bucket)

        # gloo's threads call this when the result is there. NCCL's future calls it immediately, on
        # a stream that waits for the collective, so the stamp is an event behind the collective.
        def completed(_: Any) -> None:
            stamps.completed = self._now()

        work.get_future().add_done_callback(completed)

    def on_compute_end(self, backward: graph.Backward) -> None:
        if self._record is not None and backward.reduction is self._reduction:
            self._record.compute_ended = self._record.ended = self._now()

    def on_waited(self, reduction: Reduction, bucket: Bucket) -> None:
        self._stamps(reduction, bucket).waited = self._now()

    def on_reduced(self, reduction: Reduction, bucket: Bucket) -> None:
        self._stamps(reduction, bucket).unflattened = self._now()

    def on_close(self, reduction: Reduction | None) -> None:
        if self._record is not None and reduction is self._reduction:
            is_whole = reduction is None or reduction.done == len(reduction.works)
            if self._record.ended is not None:
                self._record.ended = self._now() if is_whole else None
            self._record = self._reduction = None

    def _now(self) -> Stamp:
        return Stamp(self._device)

    def _stamps(self, reduction: Reduction, bucket: Bucket) -> _BucketStamps:
        if self._record is None or reduction is not self._reduction:
            # A backward that began before the trace, or temporary buckets: not recorded.
            return _BucketStamps()
        return self._record.buckets[bucket.index]

    def _gradient_ready(self, name: str, _: Tensor) -> None:
        # If the backward did not start at an output of the module, the reducer's hook on this
        # parameter begins it. That hook runs after this one.
        gradients = self._early
        if self._record is not None and self._record.compute_ended is None:
            gradients = self._record.gradients
        gradients.append((name, self._now()))

    def _backward(self, record: _Record) -> Backward:
        # Relative to the backward's start: CUDA events measure long times less exactly.
        began = self.entered.seconds_to(record.began)

        def at(stamp: Stamp) -> float:
            return began + record.began.seconds_to(stamp)

        bucket_of = {name: index for index, b in enumerate(record.buckets) for name in b.names}
        gradients = [Gradient(name, bucket_of[name], at(stamp)) for name, stamp in record.gradients]
        is_broken = record.ended is None
        if is_broken:
            compute_ended = gradients[-1].ready if gradients else began
        else:
            compute_ended = at(record.compute_ended)
        ended = compute_ended
        buckets = []
        if record.reduced and not is_broken:
            for index, stamps in enumerate(record.buckets):
                if stamps.unflattened is None:
                    continue  # it was skipped, or finalize_backward() comes after the trace
                launched, waited = at(stamps.launched), at(stamps.waited)
                # The callback for the completion may run a moment after the wait has returned.
                completed = min(at(stamps.completed or stamps.waited), waited)
                flattens = tuple(Interval(at(a), at(b)) for a, b in stamps.flattens)
                unflatten = Interval(waited, at(stamps.unflattened))
                described = index, stamps.nbytes, stamps.names
                buckets.append(BucketPass(*described, flattens, launched, completed, unflatten))
            ended = max([at(record.ended), *(each.unflatten.ended for each in buckets)])
        return Backward(
            began,
            compute_ended,
            ended,
            record.reduced,
            record.first,
            is_broken,
            tuple(gradients),
            tuple(buckets),
        )
