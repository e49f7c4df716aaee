"""When the parts of some steps began and ended: what stock's logging data holds.

Only steps that are sampled are measured. What that takes is put into the reducer for one backward,
and taken out at its end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.collectives import Work

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer

# Stock's: all of the first steps, then one in a hundred unless another rate is set.
FIRST = 10
RATE = 100

FORWARD_BEGAN, FORWARD_ENDED = "forward began", "forward ended"
BACKWARD_BEGAN, COMPUTE_ENDED = "backward began", "compute ended"
COMMUNICATION_BEGAN, COMMUNICATION_ENDED = "communication began", "communication ended"

_TIMES = [
    ("forward_compute_time", FORWARD_BEGAN, FORWARD_ENDED),
    ("backward_compute_time", BACKWARD_BEGAN, COMPUTE_ENDED),
    ("backward_comm_time", COMMUNICATION_BEGAN, COMMUNICATION_ENDED),
    ("backward_compute_comm_overlap_time", COMMUNICATION_BEGAN, COMPUTE_ENDED),
]
_STAMPS = [
    ("forward_compute_time_start", FORWARD_BEGAN),
    ("backward_compute_time_start", BACKWARD_BEGAN),
    ("backward_compute_time_end", COMPUTE_ENDED),
    ("backward_comm_time_start", COMMUNICATION_BEGAN),
    ("backward_comm_time_end", COMMUNICATION_ENDED),
]


class Moments:
    """The moments of one step: nanoseconds since 1970 on the host, and CUDA events on a GPU.

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

    def between(self, start: str, end: str) -> int:
        """Nanoseconds from one to the other, zero where it came before."""
        if self._events:
            passed = round(self._events[start].elapsed_time(self._events[end]) * 1e6)
        else:
            passed = self._at[end] - self._at[start]
        return max(0, passed)


class Sampler:
    """Measures the steps of one reducer that are to be measured.

    Args:
        reducer: whose backwards; referred to weakly.
        device: of its parameters; ``None`` if they are on several, which are not measured.

    Attributes:
        rate: one step in so many is measured after the first ten.
        iteration: how many steps began so far: forwards whose backward is to be reduced.
        measured: the last step whose times are known.
        times: its times in nanoseconds, and the means so far, under stock's names.
    """

    def __init__(self, reducer: Reducer, device: torch.device | None) -> None:
        self._reducer = weakref.ref(reducer)
        self._device = device
        self.rate = RATE
        self.iteration = 0
        self.measured = 0
        self.times: dict[str, int] = {}
        self._recorded = 0
        self._sample: tuple[int, Moments] | None = None

    def forward_begins(self) -> None:
        """A step begins: read what the last sample has come to, and perhaps take one."""
        if self._sample is not None:
            self._close(*self._sample)
        self.iteration += 1
        if self.iteration > FIRST and self.iteration % self.rate:
            return
        reducer = self._reducer()
        if reducer is not None and self._device is not None and self._sample is None:
            moments = Moments(self._device)
            moments.mark(FORWARD_BEGAN)
            self._sample = self.iteration, moments
            reducer.on_backward.append(self._backward_begins)

    def forward_ended(self) -> None:
        """What the module has returned is known."""
        if self._sample is not None and FORWARD_ENDED not in self._sample[1]:
            self._sample[1].mark(FORWARD_ENDED)

    def finalized(self) -> None:
        """The caller has waited for the buckets of the last backward."""
        if self._sample is not None:
            moments = self._sample[1]
            if COMMUNICATION_BEGAN in moments and COMMUNICATION_ENDED not in moments:
                moments.mark(COMMUNICATION_ENDED)

    def _backward_begins(self, end: Callable[[], None]) -> Callable[[], None]:
        """See :attr:`Reducer.on_backward`."""
        reducer = self._reducer()
        if reducer is None or self._sample is None or not reducer._reduces:
            return end
        reducer.on_backward.remove(self._backward_begins)
        moments = self._sample[1]
        moments.mark(BACKWARD_BEGAN)
        measured = _Measured(reducer._reduction, moments)
        reducer._reduction = cast(Reduction, measured)

        def measured_end() -> None:
            moments.mark(COMPUTE_ENDED)
            try:
                end()
            finally:
                _take_out(reducer, measured)

        # A backward that breaks off drops its callbacks.
        weakref.finalize(measured_end, _take_out, reducer, measured).atexit = False
        return measured_end

    def _close(self, iteration: int, moments: Moments) -> None:
        """The step of the sample is over: take its times, if they are known already."""
        reducer = self._reducer()
        if reducer is not None and self._backward_begins in reducer.on_backward:
            reducer.on_backward.remove(self._backward_begins)  # no backward came
        if all(each in moments for each in (FORWARD_ENDED, COMMUNICATION_ENDED)):
            if not moments.have_passed():
                return  # the next step may tell
            self.measured = iteration
            self._recorded += 1
            self._take(moments)
        self._sample = None

    def _take(self, moments: Moments) -> None:
        for field, start, end in _TIMES:
            time, mean = moments.between(start, end), f"avg_{field}"
            self.times[field] = time
            self.times[mean] = (
                self.times.get(mean, 0) * (self._recorded - 1) + time
            ) // self._recorded
        for field, moment in _STAMPS:
            self.times[field] = moments.host(moment)


class _Measured:
    """A reduction that does what ``inner`` does, and marks when it sends and when it is through."""

    def __init__(self, inner: Reduction, moments: Moments) -> None:
        self.inner = inner
        self._moments = moments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, bucket: Bucket) -> Work:
        if COMMUNICATION_BEGAN not in self._moments:
            self._moments.mark(COMMUNICATION_BEGAN)
        return self.inner.start(bucket)

    def finish(self, bucket: Bucket, work: Work) -> None:
        self.inner.finish(bucket, work)
        self._moments.mark(COMMUNICATION_ENDED)


def _take_out(reducer: Reducer, measured: _Measured) -> None:
    if reducer._reduction is measured:
        reducer._reduction = measured.inner
