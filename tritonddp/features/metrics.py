"""``metrics=True``: times of the parts of a step, on all ranks.

A step lasts from the end of one reduction to the end of the next::

    | input            | forward         | backward          | exposed              | input ..
    end of reduction   forward begins    backward begins     gradients are ready    end of reduction

All ranks end a reduction together. The time from that moment until the last gradient of a rank is
ready is the rank's *own* time. During ``exposed``, the rank waits for other ranks. ``exposed`` also
includes the time that a forward waits for buffers. If several backwards are accumulated, each part
is a sum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tritonddp._device import Readback, Stamp, uploaded
from tritonddp._modes import outside_modes
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.agreement import GradSource
from tritonddp.coordination.collectives import begin_all_gather
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward

EVERY = 10  # steps between two gatherings of times
_WHAT = "all-gather of times (metrics)"


class StepTimes(NamedTuple):
    """The parts of a step on one rank, in milliseconds."""

    input: float  # data, optimizer, and everything not in another part
    forward: float  # including the loss
    backward: float  # until the autograd engine has finished
    exposed: float  # synchronization that did not overlap with compute

    @property
    def own(self) -> float:
        """Time in which this rank did not wait for other ranks."""
        return self.input + self.forward + self.backward

    @property
    def step(self) -> float:
        """Length of the step."""
        return sum(self)


PARTS = ("input", "forward", "backward", "exposed")
INPUT, FORWARD, BACKWARD, EXPOSED = range(len(PARTS))
NAMES = ("step", *PARTS, "own")
# Means of a rank that knows no times: it has no inputs, or its device lags behind the host.
_UNKNOWN = [-1.0] * len(PARTS)


class StepClock:
    """Times the steps of a module on ``device``, starting at the first call of :meth:`end_step`.

    On the CPU, it uses the host clock. On a GPU, it uses events on the current stream, for which
    the host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._part = INPUT
        self._laps: list[tuple[int, Stamp]] = []  # end of the last step, and of the parts since
        # Steps whose events may not have completed.
        self._unread: deque[list[tuple[int, Stamp]]] = deque()

    def lap(self, part: int, of: int | None = None) -> None:
        """Begin ``part``. The time since the last call belongs to the part ``of``.

        By default, ``of`` is the part that began in the last call.
        """
        if self._laps:
            self._laps.append((self._part if of is None else of, Stamp(self._device)))
        self._part = part

    def end_step(self) -> list[StepTimes]:
        """End a step. Return the times of the steps that have become known since the last call."""
        self.lap(INPUT)
        if self._laps:
            self._unread.append(self._laps)
        self._laps = self._laps[-1:] or [(INPUT, Stamp(self._device))]
        found = []
        while self._unread and self._unread[0][-1][1].has_passed():
            times = [0.0] * len(PARTS)
            for (_, begun), (part, ended) in pairwise(self._unread.popleft()):
                times[part] += begun.seconds_to(ended) * 1e3
            found.append(StepTimes(*times))
        return found

    def drop_step(self) -> None:
        """Discard the time since the last step, because it was not a whole step."""
        self._part, self._laps = INPUT, []


class Metrics(Extension):
    """Times the parts of each step on this rank, and gathers the means every ``EVERY`` steps.

    Each gathering ends with the next step. Otherwise, ranks that end the backwards of several
    wrappers in different orders would wait for each other.
    """

    reads_device = "step times (metrics)"

    def __init__(self, group: Group, device: torch.device, counters: Counters) -> None:
        self._group = group
        self._device = device
        self._counters = counters
        self._clock = StepClock(device)
        self._known: list[StepTimes] = []  # of this rank, since the last gathering
        # Waits for the running gathering. Returns a tensor whose rows are the StepTimes of ranks.
        self._gathered: Callable[[], Tensor] | None = None
        self._readback: Readback | None = None  # on a GPU
        self._ranks: dict[int, StepTimes] = {}  # means of the last EVERY steps, by rank

    # The parts of a step

    def on_forward(self) -> None:
        """Begin a forward whose backward may be reduced."""
        self._clock.lap(FORWARD)

    def buffers_synchronized(self) -> None:
        """Add the time that the forward has waited for buffers of another rank to ``exposed``."""
        self._clock.lap(FORWARD, EXPOSED)

    def on_begin(self, backward: Backward) -> None:
        """Begin the backward."""
        self._clock.lap(BACKWARD)

    def on_compute_end(self, backward: Backward) -> None:
        """Begin ``exposed``, or after a local backward ``input``."""
        self._clock.lap(INPUT if backward.reduction is None else EXPOSED)

    def on_end(self, reduction: Reduction) -> None:
        """End the step with the reduction of a backward."""
        if reduction.source.is_backward:
            self._known += self._clock.end_step()
        elif reduction.source.is_empty:  # this rank has only waited
            self._clock.drop_step()
        else:
            return
        self._share(reduction)

    def on_abort(self, reduction: Reduction | None) -> None:
        """Do not count the time of a failed backward as a step; other ranks may count it."""
        self._clock.drop_step()
        # If the headers of all ranks were received and match, the other ranks continue.
        if reduction is not None and reduction.source is GradSource.BROKEN and reduction.done:
            self._share(reduction)

    # The times of all ranks

    def _share(self, reduction: Reduction) -> None:
        """Take the gathered times, and gather again; all ranks call this in the same step."""
        count, gathered = self._counters.reductions, self._gathered
        if gathered is not None or count % EVERY == 0:
            with outside_modes(), self._group.guard(reduction.where, _WHAT):
                if gathered is not None:
                    self._gathered = None
                    self._take(gathered())
                if count % EVERY == 0:
                    self._gather()

    def _gather(self) -> None:
        known, self._known = self._known, []
        means = [sum(part) / len(known) for part in zip(*known, strict=True)] or _UNKNOWN
        if self._group.size == 1:
            self._take(torch.tensor([means], dtype=torch.float32, device="cpu"))
            return
        mine = uploaded(torch.tensor([means], dtype=torch.float32, device="cpu"), self._device)
        gathered = mine.repeat(self._group.size, 1)
        work = begin_all_gather(list(gathered.split(1)), mine, self._group.process_group)
        if gathered.is_cpu:
            self._gathered = lambda: (work.wait(), gathered)[1]
            return
        work.wait()  # on the stream, not on the host
        self._readback = self._readback or Readback()
        self._readback.start(gathered)
        self._gathered = self._readback.wait

    def _take(self, rows: Tensor) -> None:
        ranks = {rank: StepTimes(*row) for rank, row in enumerate(rows.tolist()) if row[0] >= 0}
        self._ranks = ranks or self._ranks

    # Results for users

    def metrics(self) -> dict[str, float | int | None]:
        """See :meth:`tritonddp.DistributedDataParallel.metrics`."""
        found: dict[str, float | int | None] = {"step": self._counters.reductions}
        for name in NAMES:
            # Rounded to a microsecond for printing.
            times = [round(getattr(each, name), 3) for each in self._ranks.values()]
            found[f"{name}_ms"] = round(math.fsum(times) / len(times), 3) if times else None
            found[f"{name}_ms_min"] = min(times, default=None)
            found[f"{name}_ms_max"] = max(times, default=None)
        own = {rank: each.own for rank, each in self._ranks.items()}
        found["slowest_rank"] = max(own, key=own.__getitem__, default=None)
        return found
