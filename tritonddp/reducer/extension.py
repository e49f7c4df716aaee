"""The one way to plug a feature into a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.comm.reduction import Reduction, ReductionEvents
from tritonddp.reducer.graph.backward import Backward


class Extension:
    """A feature beside the plain mean. Override what you need; the rest costs nothing.

    An extension may live as long as the reducer, and must not hold a reference to it.

    Attributes:
        reads_device: what the host reads from the device in each backward, in words, for errors:
            such a backward cannot be captured in a CUDA graph. Empty if the host reads nothing.
        needs_reached: it has to know which parameters a backward will reach when that begins.
    """

    reads_device = ""
    needs_reached = False

    def on_forward(self) -> None:
        """A forward of the wrapper begins, with gradients enabled."""

    def on_begin(self, backward: Backward) -> None:
        """A backward begins. If it is reduced, its reduction is not announced yet.

        May call ``tell()``, ``skip()`` and ``hold()`` of its reduction. May raise: then this rank
        sends NaN in the collectives of the reduction.
        """

    def on_local(self, backward: Backward) -> None:
        """A backward begins that only accumulates. Called before :meth:`on_begin`."""

    def on_request(self, reduction: Reduction) -> None:
        """Accumulated gradients are about to be reduced on request.

        May call ``reduction.tell()``. May raise before anything is sent, if all ranks do; or a
        LocalError: then this rank sends NaN.
        """

    def on_pack(self, reduction: Reduction, bucket: Bucket, segment: Segment) -> None:
        """The gradients of a segment are final, and about to be packed. May replace them."""

    def on_launch(self, reduction: Reduction, bucket: Bucket) -> None:
        """``bucket`` is about to be launched."""

    def on_compute_end(self, backward: Backward) -> None:
        """The engine has run all nodes of the backward."""

    def on_reduced(self, reduction: Reduction, bucket: Bucket) -> None:
        """``.grad`` of the parameters in ``bucket`` holds the mean. May raise a LocalError."""

    def on_reduced_all(self, reduction: Reduction) -> None:
        """All buckets are reduced, and have not been rebuilt yet."""

    def on_close(self, reduction: Reduction | None) -> None:
        """A backward is over, with or without an error; or what was accumulated is reduced.

        ``reduction`` is ``None`` if the backward was local.
        """

    def on_end(self, reduction: Reduction) -> None:
        """A reduction ended without an error, and no collective is in flight. May raise."""

    def on_abort(self, reduction: Reduction | None) -> None:
        """A backward failed, or its reduction did. ``None`` if it was local.

        It may be called again for the same one, when its collectives are made up for.
        """

    def on_error(self, message: str) -> None:
        """A reduction failed with this error."""


_Kind = TypeVar("_Kind", bound=Extension)


class Events(ReductionEvents):
    """For each event, the methods of the extensions that override it."""

    on_forward: Sequence[Callable[[], None]] = ()
    on_begin: Sequence[Callable[[Backward], None]] = ()
    on_local: Sequence[Callable[[Backward], None]] = ()
    on_request: Sequence[Callable[[Reduction], None]] = ()
    on_compute_end: Sequence[Callable[[Backward], None]] = ()
    on_close: Sequence[Callable[[Reduction | None], None]] = ()
    on_end: Sequence[Callable[[Reduction], None]] = ()
    on_abort: Sequence[Callable[[Reduction | None], None]] = ()
    on_error: Sequence[Callable[[str], None]] = ()

    extensions: tuple[Extension, ...] = ()
    needs_reached = False  # an extension does

    def install(self, extension: Extension) -> None:
        """Call the methods of ``extension`` from now on."""
        self._set((*self.extensions, extension))

    def remove(self, extension: Extension) -> None:
        """Call ``extension`` no more. Does nothing if it is not installed."""
        self._set(tuple(each for each in self.extensions if each is not extension))

    def of(self, kind: type[_Kind]) -> _Kind | None:
        """The installed extension of this class, if there is one."""
        return next((each for each in self.extensions if isinstance(each, kind)), None)

    def _set(self, extensions: tuple[Extension, ...]) -> None:
        self.extensions = extensions
        for event, nothing in _EVENTS:
            methods = [
                getattr(each, event)
                for each in extensions
                if getattr(type(each), event) is not nothing
            ]
            setattr(self, event, tuple(methods))
        self.needs_reached = any(each.needs_reached for each in extensions)
        self.needs_buckets = any(getattr(self, event) for event in _EVENTS_OF_BUCKETS)


# By name, the method of an extension that does nothing. (Each of the first steps is timed, so that
# an extension comes and goes.)
_EVENTS = [(name, each) for name, each in vars(Extension).items() if name.startswith("on_")]
_EVENTS_OF_BUCKETS = [name for name in vars(ReductionEvents) if name.startswith("on_")]
