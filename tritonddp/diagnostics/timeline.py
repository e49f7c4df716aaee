"""What :func:`tritonddp.trace` recorded: times of gradients and buckets in each backward."""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tritonddp.coordination.group import Group
from tritonddp.coordination.processes import Process
from tritonddp.coordination.verify import gather_json

# A rank is slow if it is later than all others by this share of a backward.
_SLOW = 0.05

# How often the clocks of the ranks are compared.
_COMPARISONS = 15

# Rows of the Chrome trace. Numbers begin at 1: viewers take thread 0 for the idle thread.
_BACKWARD, _GRADIENTS, _COPIES, _COMMUNICATION = 1, 2, 3, 4


@dataclass(frozen=True)
class Interval:
    """From ``began`` to ``ended``, in seconds since the trace was entered."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Gradient:
    """A gradient of the parameter ``name`` that was accumulated into ``.grad``."""

    name: str
    bucket: int  # number of its bucket
    ready: float  # when, in seconds since the trace was entered


@dataclass(frozen=True)
class BucketPass:
    """One bucket in one backward; times in seconds since the trace was entered.

    Attributes:
        index: its place in the launch order.
        nbytes: bytes of its message.
        parameters: names of its parameters.
        flattens: one interval for each flatten launch: one on a GPU; on the CPU one for each
            segment of the bucket, about 4 MiB.
        launched: when the collective was launched.
        completed: when the collective had its result on this rank.
        unflatten: from the end of the wait for the result until the result was in ``.grad``.
    """

    index: int
    nbytes: int
    parameters: tuple[str, ...]
    flattens: tuple[Interval, ...]
    launched: float
    completed: float
    unflatten: Interval


@dataclass(frozen=True)
class Backward:
    """One backward on this rank; times in seconds since the trace was entered.

    Attributes:
        began: when it reached the outputs of the module, or else the first gradient.
        compute_ended: when autograd had finished it.
        ended: when the last reduced gradient was in ``.grad``.
        reduced: False under ``no_sync``: gradients stayed on this rank, and there are no buckets.
        first: whether it was the first reduced backward of the module. That one launches all
            buckets at its end; after it buckets are rebuilt in the order in which gradients became
            ready.
        broken: an exception ended it. Only its gradients are known, and it ends with the last one.
        gradients: in the order in which they became ready. With reentrant checkpoints a gradient
            may become ready several times.
        buckets: in launch order, those that were reduced inside the trace.
    """

    began: float
    compute_ended: float
    ended: float
    reduced: bool
    first: bool
    broken: bool
    gradients: tuple[Gradient, ...]
    buckets: tuple[BucketPass, ...]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def exposed(self) -> float:
        """Seconds of synchronisation that did not overlap with this backward's compute."""
        return self.ended - self.compute_ended

    def lanes(self) -> list[int]:
        """The number of a lane for each bucket: the buckets of one lane do not overlap in time."""
        free_from: list[float] = []
        lanes = []
        for bucket in self.buckets:
            free = (lane for lane, time in enumerate(free_from) if time <= bucket.launched)
            lane = next(free, len(free_from))
            free_from[lane : lane + 1] = [bucket.completed]
            lanes.append(lane)
        return lanes


@dataclass
class Timeline:
    """What one rank recorded.

    Attributes:
        rank: this rank in the module's process group.
        device: the device of the parameters.
        backwards: in the order in which they ran; complete once the trace is left.
        entered: when the trace was entered, in seconds of the host's clock.
        group: the ranks, for :meth:`gather`.
    """

    rank: int
    device: str
    backwards: list[Backward] = field(default_factory=list)
    entered: float = 0.0
    group: Group | None = field(default=None, repr=False, compare=False)

    def gather(self) -> list[Timeline]:
        """Gather the timelines of all ranks, in rank order, by the clock of rank 0. Collective.

        Call it on all ranks after the trace; all must have traced the same backwards. Ranks of one
        host share a clock. Clocks of different hosts are compared when small collectives return,
        which is exact to a fraction of a millisecond.

        Raises:
            RuntimeError: a rank has recorded other backwards, or does not take part; or this
                timeline does not come from ``trace()``.
        """
        group = self.group
        if group is None:
            raise RuntimeError(
                "gather() takes a timeline that trace() has yielded: this one has no ranks"
            )
        where, device, moments = f"rank {self.rank}, Timeline.gather()", self.device, []
        for _ in range(_COMPARISONS):
            gather_json(0, group, device, where)
            moments.append(time.perf_counter())
        mine = {
            "backwards": [asdict(each) for each in self.backwards],
            "entered": self.entered,
            "moments": moments,
            "host": Process.own().scope.partition("/")[0],
        }
        first, *_ = timelines = gather_json(mine, group, device, where)
        everybody = []
        for rank, other in enumerate(timelines):
            behind = 0.0
            if not other["host"] or other["host"] != first["host"]:
                pairs = zip(other["moments"], first["moments"], strict=True)
                behind = statistics.median(theirs - its for theirs, its in pairs)
            by = other["entered"] - behind - first["entered"]
            backwards = list(_later(other["backwards"], by))
            everybody.append(Timeline(rank, device, backwards, first["entered"]))
        kinds = [[(b.reduced, b.broken) for b in each.backwards] for each in everybody]
        if others := [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]:
            raise RuntimeError(
                f"{where}: {group.rank_list(others)} recorded other backwards than rank 0: enter "
                "and leave trace() at the same places on all ranks"
            )
        return everybody

    def save_chrome_trace(self, path: str | Path, ranks: Sequence[Timeline] = ()) -> None:
        """Write JSON for https://ui.perfetto.dev or chrome://tracing, which both open ``.gz`` too.

        Rows: the backward with its exposed part, gradients when they become ready, flatten and
        unflatten, and communication in as many rows as buckets are under way at the same time.

        Args:
            path: of the file.
            ranks: what :meth:`gather` has returned, to show all ranks, with the slowest marked;
                by default only this rank is shown.
        """
        shown, slow = list(ranks) or [self], slowest(ranks)
        found = (event for each in shown for event in each._chrome_events(each.rank == slow))
        # One event a line, so that the file can be searched with grep.
        events = ",\n".join(json.dumps(event) for event in found)
        text = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'.encode()
        path = Path(path)
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)

    def _chrome_events(self, is_slow: bool) -> Iterator[dict[str, Any]]:
        lanes = max((1 + max(b.lanes(), default=-1) for b in self.backwards), default=0)
        rows = {
            _BACKWARD: "backward",
            _GRADIENTS: "gradients ready",
            _COPIES: "flatten, unflatten",
            **{_COMMUNICATION + lane: f"communication {lane + 1}" for lane in range(lanes)},
        }
        process = {"pid": self.rank + 1}
        name = f"rank {self.rank}, {self.device}{', the slowest' if is_slow else ''}"
        yield {"ph": "M", "name": "process_name", **process, "args": {"name": name}}
        for row, name in rows.items():
            where = {**process, "tid": row}
            yield {"ph": "M", "name": "thread_name", **where, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": row}}
        for number, backward in enumerate(self.backwards):
            yield from ({**event, **process} for event in _chrome_events(number, backward))


def lateness(ranks: Sequence[Backward]) -> list[float]:
    """How many seconds after the first rank each rank ends its compute.

    ``ranks`` are the same backward on all ranks. All wait for the last one.
    """
    first = min(each.compute_ended for each in ranks)
    return [each.compute_ended - first for each in ranks]


def slowest(timelines: Sequence[Timeline]) -> int | None:
    """The rank that the others wait for; ``timelines`` are what :meth:`Timeline.gather` returned.

    Its lateness, as the median over all complete backwards, is greater than that of the second
    latest rank by 5 % of a backward. ``None`` if there is no such rank.
    """
    passes = list(zip(*(each.backwards for each in timelines), strict=True))
    whole = [ranks for ranks in passes if all(each.reduced and not each.broken for each in ranks)]
    if not whole or len(timelines) < 2:
        return None
    late = [statistics.median(each) for each in zip(*map(lateness, whole), strict=True)]
    length = statistics.median(ranks[0].seconds for ranks in whole)
    *_, second, last = sorted(late)
    return timelines[late.index(last)].rank if last - second >= _SLOW * length else None


# The classes of which a backward consists, by the names of their fields.
_CLASSES: dict[frozenset[str], Any] = {
    frozenset(each.name for each in fields(kind)): kind
    for kind in (Interval, Gradient, BucketPass, Backward)
}


def _later(content: Any, by: float) -> Any:
    """What JSON has made of ``asdict`` of a backward: it again, all times ``by`` seconds later.

    (All floats in it are times.)
    """
    if isinstance(content, list):
        return tuple(_later(each, by) for each in content)
    if isinstance(content, dict):
        values = {name: _later(each, by) for name, each in content.items()}
        return _CLASSES[frozenset(values)](**values)
    return content + by if isinstance(content, float) else content


def _chrome_events(number: int, backward: Backward) -> Iterator[dict[str, Any]]:
    kind = "broken" if backward.broken else "reduced" if backward.reduced else "local"
    whole = Interval(backward.began, backward.ended)
    facts = {"first": backward.first, "exposed_us": _us(backward.exposed)}
    sent = sum(bucket.nbytes for bucket in backward.buckets)
    yield _slice(f"backward {number} ({kind})", "backward", _BACKWARD, whole, **facts, bytes=sent)
    yield _slice("compute", "compute", _BACKWARD, Interval(backward.began, backward.compute_ended))
    if backward.exposed:
        exposed = Interval(backward.compute_ended, backward.ended)
        yield {**_slice("exposed", "exposed", _BACKWARD, exposed), "cname": "terrible"}
    for gradient in backward.gradients:
        yield {
            "ph": "i",
            "s": "t",
            "name": gradient.name,
            "cat": "gradient",
            "tid": _GRADIENTS,
            "ts": _us(gradient.ready),
            "args": {"bucket": gradient.bucket},
        }
    for bucket, lane in zip(backward.buckets, backward.lanes(), strict=True):
        what = {"bucket": bucket.index, "bytes": bucket.nbytes}
        for interval in bucket.flattens:
            yield _slice(f"flatten {bucket.index}", "flatten", _COPIES, interval, **what)
        travels, names = Interval(bucket.launched, bucket.completed), list(bucket.parameters)
        row = _COMMUNICATION + lane
        name = f"bucket {bucket.index}"
        yield _slice(name, "communication", row, travels, **what, parameters=names)
        yield _slice(f"unflatten {bucket.index}", "unflatten", _COPIES, bucket.unflatten, **what)


def _slice(
    name: str, category: str, row: int, interval: Interval, **args: object
) -> dict[str, Any]:
    ts = _us(interval.began)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "tid": row,
        "ts": ts,
        # The difference of rounded times, so that a slice does not overlap with the next one.
        "dur": round(_us(interval.ended) - ts, 3),
        "args": args,
    }


def _us(seconds: float) -> float:
    """Seconds in microseconds, the unit of the format, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)
