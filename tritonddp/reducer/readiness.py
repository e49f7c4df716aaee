"""Which gradients have come? Hooks on the parameters, and a count per segment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import register_post_accumulate_grad_hook
from tritonddp.reducer.participation import Participation


class Listener(Protocol):
    """Who is told; referred to weakly."""

    def gradient_ready(self, index: int) -> None:
        """The gradient of parameter ``index`` came, and was not expected."""

    def segment_full(self, number: int) -> None:
        """All expected gradients of segment ``number`` are there, and their hooks have run."""


class Readiness:
    """Counts the gradients of each segment as they come, and tells when none is left.

    Two kinds of hooks. A *ready hook* on each parameter counts, as cheaply as Python can
    (``register_post_accumulate_grad_hook``, half the cost of a hook on the autograd node). It runs
    before hooks of the same kind that a user has put on the parameter later, which may yet change
    the gradient. So a parameter that comes last in its segment gets an *end hook* on its autograd
    node, which the engine runs after all others: that one says that the segment is full. It stays,
    since gradients come in the same order in most backwards; where they do not, a few more
    parameters get one.

    Args:
        params: the parameters, those of a segment side by side.
        segments: the parameters of each segment, without gaps.
        listener: told of full segments and of unexpected gradients.

    Attributes:
        participation: asks the engine which of ``params`` a backward will reach.
    """

    def __init__(
        self, params: Sequence[Parameter], segments: Sequence[range], listener: Listener
    ) -> None:
        self.participation = Participation(params)
        self._segments = segments
        # The ready hooks work on these two lists, which are therefore changed in place only.
        self._awaited = [False] * len(params)
        self._pending = [0] * len(segments)
        self._segment_of = [
            number for number, segment in enumerate(segments) for _ in range(len(segment))
        ]
        self._listener = weakref.ref(listener)
        self._end_hooks: dict[int, Any] = {}
        self._ready_hooks = [
            register_post_accumulate_grad_hook(param, hook)
            for param, hook in zip(params, self._make_ready_hooks(), strict=True)
        ]
        # Parameters may outlive the wrapper. (Their autograd nodes, and the end hooks, do not.)
        self._remove = weakref.finalize(self, _remove_all, self._ready_hooks)
        self._remove.atexit = False

    def expect(self, reached: Sequence[bool], doubtful: Iterable[int]) -> None:
        """A backward begins that will reach these parameters.

        Args:
            reached: for each parameter, whether the engine announces it.
            doubtful: parameters that may get a gradient, or another one, from inner backwards,
                which the engine does not announce: only the end of the backward tells that they
                will not.
        """
        self._awaited[:] = reached
        self._pending[:] = [reached[each.start : each.stop].count(True) for each in self._segments]
        for number in {self._segment_of[index] for index in doubtful}:
            self._pending[number] += 1

    def waits(self, number: int) -> bool:
        """Whether segment ``number`` waits for gradients."""
        return self._pending[number] > 0

    def segment_of(self, index: int) -> int:
        """The number of the segment that parameter ``index`` is in."""
        return self._segment_of[index]

    def forget(self) -> None:
        """The backward is over: nothing is expected."""
        self._awaited[:] = [False] * len(self._awaited)

    def remove(self) -> None:
        """Take all hooks away."""
        self._remove()
        _remove_all(self._end_hooks.values())
        self._end_hooks.clear()

    def arrive(self, index: int) -> bool:
        """Count the gradient of parameter ``index``; ``False`` if it is not expected."""
        if not self._awaited[index]:
            return False
        self._awaited[index] = False
        number = self._segment_of[index]
        self._pending[number] -= 1
        if self._pending[number] == 0:
            self.last(index)
        return True

    def last(self, index: int) -> None:
        """No gradient of the segment of ``index`` is left, once its own hooks have run."""
        if index not in self._end_hooks:
            node = self.participation.nodes[index]
            self._end_hooks[index] = node.register_hook(self._make_end_hook(index))

    # Hooks are plain functions that refer to this object weakly: parameters and autograd nodes
    # hold them, and this object holds those, a cycle through C++ that the garbage collector could
    # not see.

    def _make_ready_hooks(self) -> Iterable[Callable[[Tensor], None]]:
        """One a parameter. Each runs once a backward: keep it short.

        What differs between them is in default arguments, and the rest in one shared closure:
        fewer objects to fetch into the cache for each parameter. It counts as :meth:`arrive` does,
        which would cost one more call.
        """
        awaited, pending = self._awaited, self._pending
        reference, listener = weakref.ref(self), self._listener

        def make(index: int, number: int) -> Callable[[Tensor], None]:
            def gradient_ready(_: Tensor, index: int = index, number: int = number) -> None:
                if awaited[index]:
                    awaited[index] = False
                    pending[number] -= 1
                    if pending[number]:
                        return
                    readiness = reference()
                    if readiness is not None:
                        readiness.last(index)
                    return
                told = listener()
                if told is not None:
                    told.gradient_ready(index)

            return gradient_ready

        return (make(index, number) for index, number in enumerate(self._segment_of))

    def _make_end_hook(self, index: int) -> Callable[..., None]:
        number, pending, listener = self._segment_of[index], self._pending, self._listener

        def segment_end(*_: Any) -> None:
            told = listener()
            if told is not None and pending[number] == 0:
                told.segment_full(number)

        return segment_end


def _remove_all(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
