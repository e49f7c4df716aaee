"""When the parts of some steps began and ended: what stock's logging data holds.

Only steps that are sampled are measured: then an extension is installed, and the next step takes
it out.
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


class Sample(Extension):
    """The moments of one step. Installed for that step only.

    Args:
        iteration: number of the step.
        device: of the parameters.
    """

    def __init__(self, iteration: int, device: torch.device) -> None:
        self.iteration = iteration
        self.moments = Moments(device)
        self.moments.mark(FORWARD_BEGAN)
        self._is_of = False  # the run whose events come now is the one that is measured

    def on_begin(self, run: ReductionRun) -> None:
        """The first backward that is reduced is the step's."""
        self._is_of = bool(run.reached) and not run.is_local and BACKWARD_BEGAN not in self.moments
        if self._is_of:
            self.moments.mark(BACKWARD_BEGAN)

    def on_launch(self, run: ReductionRun, bucket: Bucket) -> None:
        """The first bucket that is launched begins the communication."""
        if self._is_of and COMMUNICATION_BEGAN not in self.moments:
            self.moments.mark(COMMUNICATION_BEGAN)

    def on_compute_end(self, run: ReductionRun) -> None:
        """The engine is through."""
        if self._is_of:
            self.moments.mark(COMPUTE_ENDED)

    def on_reduced(self, run: ReductionRun, bucket: Bucket) -> None:
        """The last bucket that is back ends the communication."""
        if self._is_of:
            self.moments.mark(COMMUNICATION_ENDED)

    @property
    def is_complete(self) -> bool:
        """Whether all has happened."""
        return all(each in self.moments for each in (FORWARD_ENDED, COMMUNICATION_ENDED))


class Sampler:
    """Measures the steps of one reducer that are to be measured.

    Args:
        reducer: whose backwards; referred to weakly.
        device: of its parameters; ``None`` if they are on several, which are not measured.

    Attributes:
        rate: one step in so many is measured after the first ten.
        iteration: how many steps began so far: forwards whose backward is to be reduced.
        next_sample: no step before this one is measured.
        sample: of the step that is measured, ``None`` if none is.
        measured: the last step whose times are known.
        times: its times in nanoseconds, and the means so far, under stock's names.
    """

    def __init__(self, reducer: Reducer, device: torch.device | None) -> None:
        self._reducer = weakref.ref(reducer)
        self._device = device
        self.rate = RATE
        self.iteration = 0
        self.next_sample = 0
        self.sample: Sample | None = None
        self.measured = 0
        self.times: dict[str, int] = {}
        self._recorded = 0

    def forward_begins(self) -> None:
        """A step begins that may be measured: read what the last sample has come to."""
        if self.sample is not None:
            self._close(self.sample)
        if self.iteration > FIRST and self.iteration % self.rate:
            self.next_sample = self.iteration + self.rate - self.iteration % self.rate
            return
        reducer = self._reducer()
        if reducer is not None and self._device is not None and self.sample is None:
            self.sample = Sample(self.iteration, self._device)
            reducer.events.install(self.sample)

    def forward_ended(self) -> None:
        """What the module has returned is known."""
        if self.sample is not None and FORWARD_ENDED not in self.sample.moments:
            self.sample.moments.mark(FORWARD_ENDED)

    def _close(self, sample: Sample) -> None:
        """The step of the sample is over: take its times, if they are known already."""
        if sample.is_complete:
            if not sample.moments.have_passed():
                return  # the next step may tell
            self.measured = sample.iteration
            self._recorded += 1
            self._take(sample.moments)
        self.sample = None
        reducer = self._reducer()
        if reducer is not None:
            reducer.events.remove(sample)

    def _take(self, moments: Moments) -> None:
        for field, start, end in _TIMES:
            time, mean = moments.nanoseconds(start, end), f"avg_{field}"
            self.times[field] = time
            self.times[mean] = (
                self.times.get(mean, 0) * (self._recorded - 1) + time
            ) // self._recorded
        for field, moment in _STAMPS:
            self.times[field] = moments.host(moment)
