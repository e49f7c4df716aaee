"""The one way to plug a feature into a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.comm.run import ReductionRun, RunEvents
from tritonddp.coordination.agreement import GradSource

# Backwards that run to their end.
_WHOLE = (GradSource.FORWARD, GradSource.AGAIN, GradSource.ELSEWHERE)


class Extension:
    """What a reducer does beside the plain mean. Override what you need; the rest costs nothing.

    An extension may live as long as the reducer, and must not hold it.

    Attributes:
        reads_device: what the host asks the device in each backward, in words, for errors: then no
            CUDA graph can hold one. Empty if nothing.
        report_nbytes: how much :meth:`report` returns; then the reducer is made with it.
    """

    reads_device = ""
    report_nbytes = 0

    def report(self, run: ReductionRun) -> bytes:
        """What this rank says in ``run`` beside its header, ``report_nbytes`` long.

        Zeros of a rank that is not asked: one whose gradients are not those of a whole backward.
        What all ranks say a second time in a row is not handed over: count, if that matters.
        """
        return bytes(self.report_nbytes)

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """What each rank has said: the first bucket is there. Must not raise.

        On a GPU that is when the host has it: before the next forward or backward.
        """

    def on_forward(self) -> None:
        """A forward of the wrapper begins that runs with gradients."""

    def on_buffers(self) -> None:
        """It has waited for the buffers of another rank."""

    def on_begin(self, run: ReductionRun) -> None:
        """A backward begins, or what it accumulated is reduced on request.

        May set ``run.weight`` and ``run.skipped``, or add to ``run.unfilled``. May raise: then this
        rank takes part in what the others reduce with NaN.
        """

    def on_pack(self, run: ReductionRun, bucket: Bucket, segment: Segment) -> None:
        """The gradients of a segment are final, and about to be packed. May replace them."""

    def on_packed(self, run: ReductionRun, bucket: Bucket) -> None:
        """A segment of ``bucket`` has been packed."""

    def on_launch(self, run: ReductionRun, bucket: Bucket) -> None:
        """``bucket`` is about to be launched."""

    def on_launched(self, run: ReductionRun, bucket: Bucket, work: Any) -> None:
        """``bucket`` is on its way."""

    def on_compute_end(self, run: ReductionRun) -> None:
        """The engine is through with the backward."""

    def on_waited(self, run: ReductionRun, bucket: Bucket) -> None:
        """The sum over ranks is in ``bucket``: on a GPU, when the current stream comes here."""

    def on_reduced(self, run: ReductionRun, bucket: Bucket) -> None:
        """``.grad`` of the parameters in ``bucket`` holds the mean. May raise a LocalError."""

    def on_reduced_all(self, run: ReductionRun) -> None:
        """All buckets of ``run`` are back, and not yet replaced by others."""

    def on_all_ended(self, run: ReductionRun) -> None:
        """All ranks come here, also those whose backward broke off: collectives may be made."""

    def on_close(self, run: ReductionRun) -> None:
        """The run is over, whatever has become of it."""

    def on_end(self, run: ReductionRun) -> None:
        """The run came to its end, and nothing is under way any more. May raise."""

    def on_abort(self, run: ReductionRun) -> None:
        """The backward of ``run`` broke off, or the run failed."""


_Kind = TypeVar("_Kind", bound=Extension)


class Events(RunEvents):
    """For each event, the methods of the extensions that want it."""

    on_forward: Sequence[Callable[[], None]] = ()
    on_buffers: Sequence[Callable[[], None]] = ()
    on_begin: Sequence[Callable[[ReductionRun], None]] = ()
    on_compute_end: Sequence[Callable[[ReductionRun], None]] = ()
    on_all_ended: Sequence[Callable[[ReductionRun], None]] = ()
    on_close: Sequence[Callable[[ReductionRun], None]] = ()
    on_end: Sequence[Callable[[ReductionRun], None]] = ()
    on_abort: Sequence[Callable[[ReductionRun], None]] = ()

    extensions: tuple[Extension, ...] = ()
    has_of_runs = False  # one wants to know of the buckets of a run
    has_of_ends = False  # or of its end

    def __init__(self, reporters: Sequence[Extension] = ()) -> None:
        self.reporters = tuple(reporters)  # and what they say is as long as ever
        self._tell(self.reporters)

    def report(self, run: ReductionRun) -> bytes:
        """What this rank says in ``run`` beside its header."""
        if run.source not in _WHOLE:
            return b""
        return b"".join([each.report(run) for each in self.reporters])

    def on_reports(self, reports: Sequence[bytes]) -> None:
        """Hand what all ranks have said to whom it belongs."""
        begin = 0
        for each in self.reporters:
            end = begin + each.report_nbytes
            each.take_reports([report[begin:end] for report in reports])
            begin = end

    def install(self, extension: Extension) -> None:
        """Tell ``extension`` of what happens from now on."""
        self._tell((*self.extensions, extension))

    def remove(self, extension: Extension) -> None:
        """Tell ``extension`` nothing any more. Nothing happens if it is told nothing."""
        self._tell(tuple(each for each in self.extensions if each is not extension))

    def of(self, kind: type[_Kind]) -> _Kind | None:
        """The one extension of this class that is told of what happens, if there is one."""
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
        self.has_of_ends = bool(self.on_reduced_all or self.on_all_ended)
        self.has_of_runs = any(getattr(self, event) for event in RunEvents.__annotations__)


class SyncState:
    """What the next backward is: the wrapper writes, the reducer reads."""

    __slots__ = ("enabled", "join", "weight")

    def __init__(self) -> None:
        self.enabled = True  # it is reduced; off inside no_sync
        self.weight: Any = None  # how much it counts, None if as much as others
        self.join: Any = None  # what the ranks tell each other inside join(), None outside

    @property
    def source_rank(self) -> int:
        """Whose buffers, and whose order of gradients, all ranks take over."""
        return 0 if self.join is None else self.join.source_rank
