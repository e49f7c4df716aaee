"""``model.metrics()``: each rank sends its times of a step, its *report*, in the next reduction."""

from __future__ import annotations

import logging
import math
import operator
import statistics
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence

import torch

from tritonddp._arguments import check_every
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.features.metrics.step_times import (
    BACKWARD,
    EXPOSED,
    FORWARD,
    INPUT,
    NAMES,
    StepClock,
    StepTimes,
)
from tritonddp.features.metrics.stragglers import Straggler, Stragglers
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward

logger = logging.getLogger("tritonddp.metrics")

# A number that changes from report to report (never 0), and the times of a step in ms.
_REPORT = struct.Struct(f"<B{len(StepTimes())}f")

# Milliseconds that it takes to measure a step, to tell the other ranks and to look for a slow one
# (on a CPU of 2.8 GHz), those that each rank of the group adds, and the share of the time that may
# go into it: of short steps not all are measured.
_COST, _COST_OF_RANK, _SHARE = 0.28, 0.005, 0.005
_RECENT = 5  # measured steps whose median is the length of a step
_MOST = 32  # at least one step in so many is measured

_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio: its multiples are spread most evenly

# Share of the last step in the running mean of speeds.
_SMOOTHING = 0.2


class Metrics(Extension):
    """Times the parts of each step on this rank, and receives the times of the other ranks.

    The times are those of the step before: the last one that is complete when a reduction begins.
    On a GPU they may be older. It reads the clock once at the end of each part, and makes no
    collective. Of short steps it measures one in so many, the same on all ranks. In between, ranks
    repeat their reports, and :meth:`take_reports` is mostly not called.
    """

    reads_device = "how long the parts of a step take (metrics)"
    report_nbytes = _REPORT.size

    def __init__(self, group: Group, device: torch.device, counters: Counters) -> None:
        self._group = group
        self._counters = counters
        self._clock = StepClock(device)
        self._mine: StepTimes | None = None  # times of the last step, until they are reported
        self._number = 0  # of the last report
        self._report = bytes(_REPORT.size)
        self._taken: Sequence[bytes] = [self._report] * group.size  # the last reports of all ranks
        self._lengths: deque[float] = deque(maxlen=_RECENT)  # of steps, in ms
        self._bits = 0  # one step in 2**bits is measured
        self._measures = False  # the current step is measured
        self._sent_before = 0  # bytes sent before the last step
        self._sent = 0  # bytes sent in it
        self._ranks: list[StepTimes] = []  # of all ranks, in the last step that all have reported
        self._speeds: list[float] = []  # items a millisecond, by rank
        self._stragglers = Stragglers(group.size)
        self._where = ""
        self._every = 0  # steps from one line of the log to the next; 0: no lines
        self._write: Callable[[str], None] = logger.info

    # The parts of a step

    def on_forward(self) -> None:
        """A forward begins whose backward may be reduced."""
        if self._measures:
            self._clock.lap(FORWARD)

    def buffers_synchronised(self) -> None:
        """The forward has waited for the buffers of another rank."""
        if self._measures:
            self._clock.lap(FORWARD, EXPOSED)

    def on_begin(self, backward: Backward) -> None:
        """A backward begins."""
        self._where = backward.where
        if self._measures:
            self._clock.lap(BACKWARD)

    def on_compute_end(self, backward: Backward) -> None:
        """The autograd engine has finished the backward."""
        if self._measures:
            self._clock.lap(INPUT if backward.reduction is None else EXPOSED)

    def on_end(self, reduction: Reduction) -> None:
        """The reduction of a backward is over: the step ends here."""
        if not reduction.source.is_backward:
            return
        was_measured = self._measures
        self._measures = _is_measured(self._counters.reductions + 1, self._bits)
        if self._measures or was_measured or self._clock.is_behind:
            items = 1.0 if reduction.weight is None else reduction.weight.items
            mine = self._clock.end_step(self._measures, items)
            if mine is not None:
                self._mine = mine
                if reduction.is_alone:
                    self._take([mine])
        sent = self._counters.sent_bytes
        self._sent, self._sent_before = sent - self._sent_before, sent
        is_due = self._every and self._counters.reductions % self._every == 0
        if is_due and self._group.rank == 0:
            self._write(self._line())

    def on_abort(self, reduction: Reduction | None) -> None:
        """The backward failed: do not count its time as a step."""
        self._clock.drop_step()
        self._measures, self._mine = False, None

    # Reports

    def report(self, reduction: Reduction) -> bytes:
        """See :meth:`Extension.report`."""
        if self._mine is not None:
            mine, self._mine = self._mine, None
            self._number = self._number % 255 + 1
            self._report = _REPORT.pack(self._number, *mine)
        return self._report

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """See :meth:`Extension.take_reports`."""
        if any(map(operator.eq, reports, self._taken)):
            return  # some rank repeats its last report
        unpacked = list(map(_REPORT.unpack, reports))
        if all(number for number, *_ in unpacked):
            self._taken = reports
            self._take([StepTimes(*times) for _, *times in unpacked])

    def _take(self, ranks: list[StepTimes]) -> None:
        self._ranks = ranks
        self._lengths.append(sum(each.total for each in ranks) / len(ranks))
        # (If steps become long, that is seen in the first one.)
        length = max(statistics.median(self._lengths), self._lengths[-1])
        cost = (_COST + _COST_OF_RANK * len(ranks)) / _SHARE
        self._bits = math.ceil(math.log2(min(max(1.0, cost / length), _MOST))) if length > 0 else 0
        self._speeds = self._speeds or [0.0] * len(ranks)
        for rank, times in enumerate(ranks):
            computing, known = times.forward + times.backward, self._speeds[rank]
            if computing > 0 and times.items > 0:
                speed = times.items / computing
                self._speeds[rank] += (_SMOOTHING if known else 1.0) * (speed - known)
        before, now = self._stragglers.slowest, self._stragglers.step(ranks)
        if self._group.rank == 0 and (before and before[:2]) != (now and now[:2]):
            self._log_slowest(now)

    def _log_slowest(self, slowest: Straggler | None) -> None:
        """Log that a rank became slow, or that none is slow any more."""
        if slowest is None:
            logger.info("%s: no rank is slower than the others any more", self._where)
            return
        times = self._ranks[slowest.rank]
        logger.warning(
            "%s: rank %d is slow: its %s takes %.0f %% of a step longer than on other ranks, which "
            "wait for it (last: input %.1f, forward %.1f, backward %.1f ms)",
            self._where,
            slowest.rank,
            slowest.part,
            100 * slowest.share,
            *times[:3],
        )

    # What users read

    def metrics(self) -> dict[str, float | int | str | None]:
        """See :meth:`tritonddp.DistributedDataParallel.metrics`."""
        ranks, slowest = self._ranks, self._stragglers.slowest
        mean: StepTimes | None = None
        if ranks:
            mean = StepTimes(*(sum(part) / len(ranks) for part in zip(*ranks, strict=True)))
        own = [each.own for each in ranks]
        return {
            "step": self._counters.reductions,
            "step_ms": mean and mean.total,
            **{f"{part}_ms": mean and getattr(mean, part) for part in NAMES},
            "skew_ms": max(own) - min(own) if own else None,
            "sent_bytes": self._sent,
            "slowest_rank": slowest and slowest.rank,
            "slowest_phase": slowest and slowest.part,
            "slowest_by": slowest and slowest.share,
        }

    def shares(self) -> list[float]:
        """See :meth:`tritonddp.DistributedDataParallel.suggested_shares`."""
        if not self._speeds or min(self._speeds) <= 0:
            raise RuntimeError(
                f"rank {self._group.rank}: the speeds of the ranks are not known yet: make some "
                "steps first"
            )
        total = sum(self._speeds)
        return [speed / total for speed in self._speeds]

    def log(self, every: int, write: Callable[[str], None] | None) -> None:
        """See :meth:`tritonddp.DistributedDataParallel.log_metrics`."""
        self._every = check_every(every)
        if write is None:
            write = logger.info if logger.isEnabledFor(logging.INFO) else _to_stderr
        self._write = write

    def _line(self) -> str:
        found = self.metrics()
        if found["step_ms"] is None:
            return f"step {found['step']}: its times are not known yet"
        parts = ", ".join(f"{part} {found[f'{part}_ms']:.1f}" for part in NAMES)
        text = (
            f"step {found['step']}: {found['step_ms']:.1f} ms ({parts}), "
            f"skew {found['skew_ms']:.1f} ms, {self._sent / 1e6:.2f} MB sent"
        )
        slowest = self._stragglers.slowest
        if slowest is None:
            return text
        return f"{text}; rank {slowest.rank} is slow in its {slowest.part}: {slowest.share:.0%}"


def _is_measured(step: int, bits: int) -> bool:
    """Whether this step is the one of ``2**bits`` steps that is measured.

    Not the first, say, of each block: in a program that does something in every fourth step it
    would always be that one, or never.
    """
    block, offset = step >> bits, step & ((1 << bits) - 1)
    return offset == (block * _GOLDEN & 0xFFFFFFFF) >> (32 - bits)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
