"""When the parts of some steps began and ended: what stock's logging data holds.

Only some steps are measured: in those an extension is installed, which the next one takes out.
"""

from __future__ import annotations

import weakref

import torch

from tritonddp._device import Moments
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.run import ReductionRun
from tritonddp.reducer.extension import Extension
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


class Sampler(Extension):
    """Measures the steps of one reducer that are to be measured."""

    def __init__(self, reducer: Reducer, device: torch.device | None) -> None:
        self._reducer = weakref.ref(reducer)
        self._device = device  # None if parameters are on several: these are not measured
        self.rate = RATE  # one step in so many is measured after the first ten
        self.iteration = 0  # steps that began so far: forwards whose backward is to be reduced
        self.next_sample = 0  # no step before this one is measured
        self.moments: Moments | None = None  # of the step that is measured, if one is
        self._sampled = 0  # the step that they are of
        self._is_of = False  # the run whose events come now is the one that is measured
        self.measured = 0  # the last step whose times are known
        self.times: dict[str, int] = {}  # its nanoseconds, and the means so far, by stock's names
        self._recorded = 0

    def forward_begins(self) -> None:
        """A step begins that may be measured: read what the last sample has come to."""
        if self.moments is not None:
            self._close(self.moments)
        if self.iteration > FIRST and self.iteration % self.rate:
            self.next_sample = self.iteration + self.rate - self.iteration % self.rate
            return
        reducer = self._reducer()
        if reducer is not None and self._device is not None and self.moments is None:
            self._sampled, self._is_of = self.iteration, False
            self.moments = Moments(self._device)
            self.moments.mark(FORWARD_BEGAN)
            reducer.events.install(self)

    def forward_ended(self) -> None:
        """What the module has returned is known."""
        if self.moments is not None and FORWARD_ENDED not in self.moments:
            self.moments.mark(FORWARD_ENDED)

    def on_begin(self, run: ReductionRun) -> None:
        """The first backward that is reduced is the step's."""
        assert self.moments is not None
        self._is_of = bool(run.reached) and not run.is_local and BACKWARD_BEGAN not in self.moments
        self._mark(BACKWARD_BEGAN)

    def on_launch(self, run: ReductionRun, bucket: Bucket) -> None:
        """The first bucket that is launched begins the communication."""
        if self.moments is not None and COMMUNICATION_BEGAN not in self.moments:
            self._mark(COMMUNICATION_BEGAN)

    def on_compute_end(self, run: ReductionRun) -> None:
        self._mark(COMPUTE_ENDED)

    def on_reduced(self, run: ReductionRun, bucket: Bucket) -> None:
        """The last bucket that is back ends the communication."""
        self._mark(COMMUNICATION_ENDED)

    def _mark(self, name: str) -> None:
        if self._is_of and self.moments is not None:
            self.moments.mark(name)

    def _close(self, moments: Moments) -> None:
        """The step is over: take its times, if they are known already."""
        if FORWARD_ENDED in moments and COMMUNICATION_ENDED in moments:
            if not moments.have_passed():
                return  # the next step may tell
            self.measured = self._sampled
            self._recorded += 1
            for field, start, end in _TIMES:
                time, mean = moments.nanoseconds(start, end), f"avg_{field}"
                total = self.times.get(mean, 0) * (self._recorded - 1) + time
                self.times |= {field: time, mean: total // self._recorded}
            for field, moment in _STAMPS:
                self.times[field] = moments.host(moment)
        self.moments = None
        reducer = self._reducer()
        if reducer is not None:
            reducer.events.remove(self)
