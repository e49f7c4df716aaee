"""The one way to plug a feature into a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.comm.run import ReductionRun, RunEvents
from tritonddp.coordination.agreement import GradSource

# Ordinary backwards: not those that failed, nor gradients that are reduced on request.
_WHOLE = (GradSource.FORWARD, GradSource.AGAIN, GradSource.ELSEWHERE)


class Extension:
    """A feature beside the plain mean. Override what you need; the rest costs nothing.

    An extension may live as long as the reducer, and must not hold a reference to it. A *report* is
    a few bytes that each rank sends to all others in each reduction, behind its header in the first
    bucket.

    Attributes:
        reads_device: what the host reads from the device in each backward, in words, for errors:
            such a backward cannot be captured in a CUDA graph. Empty if the host reads nothing.
        report_nbytes: length of :meth:`report` in bytes. An extension with a report has to be given
            to the constructor of the reducer.
    """

    reads_device = ""
    report_nbytes = 0

    def report(self, run: ReductionRun) -> bytes:
        """The report of this rank in ``run``, ``report_nbytes`` long.

        Called only where an ordinary backward begins on this rank; else the report is all zeros.
        If all ranks repeat their headers and reports of the last reduction, :meth:`take_reports` is
        not called: include a counter, if that matters.
        """
        return bytes(self.report_nbytes)

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """Take the report of each rank, when the first bucket is reduced. Must not raise.

        On a GPU this is called when the host has the bytes: before the next forward or backward.
        """

    def on_forward(self) -> None:
        """A forward of the wrapper begins, with gradients enabled."""

    def on_buffers(self) -> None:
        """The forward has waited for the module buffers of another rank."""

    def on_begin(self, run: ReductionRun) -> None:
        """A backward begins, or accumulated gradients are reduced on request.

        May set ``run.weight`` and ``run.skipped``, or add to ``run.unfilled``. May raise: then this
        rank sends NaN in the collectives of this reduction.
        """

    def on_pack(self, run: ReductionRun, bucket: Bucket, segment: Segment) -> None:
        """The gradients of a segment are final, and about to be packed. May replace them."""

    def on_packed(self, run: ReductionRun, bucket: Bucket) -> None:
        """A segment of ``bucket`` has been packed."""

    def on_launch(self, run: ReductionRun, bucket: Bucket) -> None:
        """``bucket`` is about to be launched."""

    def on_launched(self, run: ReductionRun, bucket: Bucket, work: Any) -> None:
        """``bucket`` has been launched."""

    def on_compute_end(self, run: ReductionRun) -> None:
        """The engine has run all nodes of the backward."""

    def on_waited(self, run: ReductionRun, bucket: Bucket) -> None:
        """The sum over ranks is in ``bucket``; on a GPU, for later work of the stream."""

    def on_reduced(self, run: ReductionRun, bucket: Bucket) -> None:
        """``.grad`` of the parameters in ``bucket`` holds the mean. May raise a LocalError."""

    def on_reduced_all(self, run: ReductionRun) -> None:
        """All buckets of ``run`` are reduced, and have not been rebuilt yet."""

    def on_close(self, run: ReductionRun) -> None:
        """The run is over, with or without an error."""

    def on_end(self, run: ReductionRun) -> None:
        """The run ended without an error, and no collective is in flight. May raise."""

    def on_abort(self, run: ReductionRun) -> None:
        """The backward of ``run`` failed, or the run did."""


_Kind = TypeVar("_Kind", bound=Extension)


class Events(RunEvents):
    """For each event, the methods of the extensions that override it."""

    on_forward: Sequence[Callable[[], None]] = ()
    on_buffers: Sequence[Callable[[], None]] = ()
    on_begin: Sequence[Callable[[ReductionRun], None]] = ()
    on_compute_end: Sequence[Callable[[ReductionRun], None]] = ()
    on_close: Sequence[Callable[[ReductionRun], None]] = ()
    on_end: Sequence[Callable[[ReductionRun], None]] = ()
    on_abort: Sequence[Callable[[ReductionRun], None]] = ()

    extensions: tuple[Extension, ...] = ()
    has_of_runs = False  # an extension overrides an event of the buckets of a run

    def __init__(self, reporters: Sequence[Extension] = ()) -> None:
        self.reporters = tuple(reporters)  # fixed: the length of a header depends on them
        self._tell(self.reporters)

    def report(self, run: ReductionRun) -> bytes:
        """The reports of this rank in ``run``, of all extensions, one after the other."""
        if run.source not in _WHOLE:
            return b""
        return b"".join([each.report(run) for each in self.reporters])

    def on_reports(self, reports: Sequence[bytes]) -> None:
        """Give each extension its reports of all ranks."""
        begin = 0
        for each in self.reporters:
            end = begin + each.report_nbytes
            each.take_reports([report[begin:end] for report in reports])
            begin = end

    def install(self, extension: Extension) -> None:
        """Call the methods of ``extension`` from now on."""
        self._tell((*self.extensions, extension))

    def remove(self, extension: Extension) -> None:
        """Call ``extension`` no more. Does nothing if it is not installed."""
        self._tell(tuple(each for each in self.extensions if each is not extension))

    def of(self, kind: type[_Kind]) -> _Kind | None:
        """The installed extension of this class, if there is one."""
        return next((each for each in self.extensions if isinstance(each, kind)), None)

    def _tell(self, extensions: tuple[Extension, ...]) -> None:
        self.extensions = extensions
        for event in (name for name in vars(Extension) if name.startswith("on_")):
            nothing = getattr(Extension, event)
            methods = (
                getattr(each, event)
                for each in extensions
                if getattr(type(each), event) is not nothing
            )
            setattr(self, event, tuple(methods))
        self.has_of_runs = any(getattr(self, event) for event in RunEvents.__annotations__)


class SyncState:
    """Settings of the next backward: the wrapper writes them, the reducer reads them."""

    __slots__ = ("enabled", "join", "weight")

    def __init__(self) -> None:
        self.enabled = True  # the backward is reduced; False inside no_sync
        self.weight: Any = None  # the weight of its gradients, None for an unweighted mean
        self.join: Any = None  # the join protocol of the ranks inside join(), None outside

    @property
    def source_rank(self) -> int:
        """The rank whose buffers and order of gradients all ranks use."""
        return 0 if self.join is None else self.join.source_rank
