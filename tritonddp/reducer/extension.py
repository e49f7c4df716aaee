"""The interface by which features take part in a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.comm.reduction import Reduction, ReductionEvents
from tritonddp.reducer.graph.backward import Backward


class Extension:
    """A feature in addition to the plain mean. Override only the methods that you need.

    An extension may live as long as the reducer, and must not hold a reference to it.

    Attributes:
        reads_device: what the host reads from the device in each backward, as a phrase for
            error messages: such a backward cannot be captured in a CUDA graph. Empty if the host
            reads nothing.
        needs_reached: the extension needs to know at the start of a backward which parameters
            it will reach.
    """

    reads_device = ""
    needs_reached = False

    def on_forward(self) -> None:
        """Called when a forward of the wrapper begins with gradients enabled."""

    def on_begin(self, backward: Backward) -> None:
        """Called when a backward begins. If it is reduced, nothing of its reduction is sent yet.

        The method may call ``tell()``, ``skip()`` and ``hold()`` of the reduction. If it raises,
        this rank sends NaN in the collectives of the reduction.
        """

    def on_local(self, backward: Backward) -> None:
        """Called before :meth:`on_begin` when a backward begins that only accumulates."""

    def on_request(self, reduction: Reduction) -> None:
        """Called before accumulated gradients are reduced on request.

        The method may call ``reduction.tell()``. It may raise before anything is sent, if all ranks
        do. It may raise a LocalError: then this rank sends NaN.
        """

    def on_pack(self, reduction: Reduction, bucket: Bucket, segment: Segment) -> None:
        """Called before the final gradients of a segment are packed. May replace them."""

    def on_launch(self, reduction: Reduction, bucket: Bucket) -> None:
        """Called before ``bucket`` is launched."""

    def on_compute_end(self, backward: Backward) -> None:
        """Called when the engine has run all nodes of the backward."""

    def on_reduced(self, reduction: Reduction, bucket: Bucket) -> None:
        """Called when ``.grad`` of the parameters in ``bucket`` holds the mean.

        The method may raise a LocalError.
        """

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Called when all buckets are reduced, and before they are rebuilt."""

    def on_close(self, reduction: Reduction | None) -> None:
        """Called after a backward, with or without an error, and after a reduction on request.

        ``reduction`` is ``None`` if the backward was local.
        """

    def on_end(self, reduction: Reduction) -> None:
        """Called after a reduction without an error. No collective is in flight. May raise."""

    def on_abort(self, reduction: Reduction | None) -> None:
        """Called after a failed backward or reduction; ``reduction`` is ``None`` if it was local.

        It may be called again for the same backward, when its outstanding collectives are
        completed.
        """

    def on_error(self, message: str) -> None:
        """Called with the error message of a failed reduction."""


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
    needs_reached = False  # True if an extension needs it

    def install(self, extension: Extension) -> None:
        """Call the methods of ``extension`` from now on."""
        self._set((*self.extensions, extension))

    def remove(self, extension: Extension) -> None:
        """Remove ``extension``. Do nothing if it is not installed."""
        self._set(tuple(each for each in self.extensions if each is not extension))

    def of(self, kind: type[_Kind]) -> _Kind | None:
        """Return the installed extension of this class, if any."""
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


# Empty methods of Extension by name. Precomputed, because an extension that times each of the first
# steps is installed and removed repeatedly.
_EVENTS = [(name, each) for name, each in vars(Extension).items() if name.startswith("on_")]
_EVENTS_OF_BUCKETS = [name for name in vars(ReductionEvents) if name.startswith("on_")]
