"""Which gradients have come? A log that C writes, and one Python hook a segment that reads it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import count
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import current_stream, follow
from tritonddp._torch import register_post_accumulate_grad_hook, will_engine_execute
from tritonddp.reducer.participation import gradient_nodes

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer

# Position in the log of a segment that no hook finds full: the end of the backward tells.
_NEVER = -1
# While no hook is to look: the backward accumulates only, or its buckets are launched at its end.
_NOBODY_LOOKS = -1


class ReadyTracker:
    """Knows which gradients of a backward have come, and tells when a segment has all of its own.

    In a steady step no Python runs for a gradient. Each parameter has the same hook, a
    ``functools.partial``, which C calls, and whose function can be exchanged: while a backward runs
    it is ``list.append``, so that the *log* holds the parameters in the order of their gradients.
    Between backwards it is a function of the reducer: the first gradient of a backward that does
    not begin at an output of the module.

    The parameter that comes last in its segment has a Python hook besides, on its autograd node,
    which the engine runs after all hooks that a user may have put on the parameter. It compares the
    log with that of the last backward, in C. Where they differ, the segment is looked at, and if a
    gradient is missing, that parameter gets such a hook, and is waited for. So where the order
    changes with each step, hooks are added until each parameter has one.

    Args:
        params: the parameters, those of a segment side by side.
        ranges: for each segment, the numbers of its parameters, without gaps.
        segments_of: for each bucket, the numbers of its segments.
        listener: who is told; referred to weakly.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        ranges: Sequence[range],
        segments_of: Sequence[range],
        listener: Reducer,
    ) -> None:
        # Holding AccumulateGrad nodes keeps them, and the hooks registered on them, alive: autograd
        # itself refers to them only weakly.
        self.nodes = gradient_nodes(params)
        # For each parameter, whether the backward that runs on this thread will reach it. None for
        # torch.autograd.grad with respect to some of the parameters. To be called from a hook. No
        # graph is walked and no output looked at: the engine has just computed which nodes it will
        # run, so the answer is right for any loss. It is blind to inner backwards of reentrant
        # checkpoints.
        self.query: Callable[[], list[bool] | None] = partial(will_engine_execute, self.nodes)
        self.log: list[Tensor] = []  # the parameters in the order of their gradients
        self.reached: list[bool] = []  # for each parameter, whether the engine has announced it
        self.waiting: list[int] = []  # for each bucket, how many segments wait for gradients
        # On a GPU, the streams that these nodes run on, as far as known: those that were current
        # when they were made, by us, or before by somebody who still holds them.
        self.streams: list[Any] = []
        self.streams_beside: list[Any] = []  # all but one
        self._unheard = {param for param in params if param.is_cuda}  # whose is not known
        self._hears = False  # a backward runs that tells some
        self._params = list(params)
        self._ranges = ranges
        self._segments_of = segments_of
        # For each parameter, the number of its segment.
        self.segment_of = [number for number, each in enumerate(ranges) for _ in each]
        self._number_of = dict(zip(map(id, params), count()))
        self._order = list(range(len(params)))  # of the last backward's gradients, as far as known
        self._doubtful: Collection[int] = ()
        # What the end hooks read: lists that are changed in place.
        self._usual: list[Tensor] = []  # the log that is expected
        self._expected: list[Tensor] = []  # what is in it
        self._full_at = [_NEVER] * len(ranges)  # for each segment, how long the log is then
        self._last = [_NEVER] * len(ranges)  # for each segment, who is expected to come last
        self._looked = [_NOBODY_LOOKS]  # how much of the log is known to be as expected
        self._listener = weakref.ref(listener)
        self._end_hooks: dict[int, Any] = {}
        # Functions and arguments of the hook. Held here: the hook may be exchanged while it runs.
        self._idle: tuple[Any, ...] = (_first_gradient, (self._listener,), {}, None)
        self._logging: tuple[Any, ...] = (self.log.append, (), {}, None)
        heard = (self.log, self.streams, self.streams_beside, self._unheard)
        self._hearing: tuple[Any, ...] = (_gradient_on_stream, heard, {}, None)
        self._hook: Any = partial(_first_gradient, self._listener)
        self._handles = [register_post_accumulate_grad_hook(param, self._hook) for param in params]
        # Parameters may outlive the wrapper. (Their autograd nodes, and the end hooks, do not.)
        self._remove = weakref.finalize(self, _remove_all, self._handles)
        self._remove.atexit = False

    def begin(self, reached: list[bool], doubtful: Collection[int], looks: bool) -> None:
        """A backward begins that will reach these parameters.

        Args:
            reached: for each parameter, whether the engine announces it.
            doubtful: parameters that may get a gradient, or another one, from inner backwards,
                which the engine does not announce: only the end of the backward tells that they
                will not.
            looks: segments are told when they are full.
        """
        self.log.clear()
        if reached != self.reached or doubtful != self._doubtful:
            self._expect(reached, doubtful)
        self._hook.__setstate__(self._hearing if self._hears else self._logging)
        self._looked[0] = 0 if looks else _NOBODY_LOOKS

    def stop(self) -> None:
        """The backward is over: what comes now begins another one."""
        self._hook.__setstate__(self._idle)
        self._looked[0] = _NOBODY_LOOKS
        self._hears = False

    def follow(self, number: int | None = None) -> None:
        """The current stream comes behind all gradients, and may read those of a segment, or all.

        Autograd runs a hook behind the gradient of its own node only. (The end of a backward it
        runs behind all, but the memory of gradients is kept for the streams of their nodes alone.)
        """
        params = self._params
        if number is not None:
            params = [params[each] for each in self._ranges[number]]
        follow(self.streams, [param.grad for param in params])

    def inherit(self, former: ReadyTracker) -> None:
        """Nodes that ``former`` holds too run on the streams that it knows."""
        self.streams[:], self.streams_beside[:] = former.streams, former.streams_beside
        self._unheard.difference_update(set(former._params).difference(former._unheard))

    def remove(self) -> None:
        """Take all hooks away."""
        self._remove()
        _remove_all(self._end_hooks.values())
        self._end_hooks.clear()

    def _expect(self, reached: list[bool], doubtful: Collection[int]) -> None:
        self.reached = []  # until all that follows is there
        usual = [number for number in self._order if reached[number]]
        self._usual[:] = self._expected = [self._params[number] for number in usual]
        self._full_at[:] = self._last[:] = [_NEVER] * len(self._ranges)
        for position, number in enumerate(usual, start=1):
            segment = self.segment_of[number]
            self._full_at[segment], self._last[segment] = position, number
        self._hears = not self._unheard.isdisjoint(self._expected)
        waits = [number != _NEVER for number in self._last]
        for number in doubtful:
            segment = self.segment_of[number]
            self._last[segment], waits[segment] = _NEVER, True
        self.waiting = [sum(waits[each.start : each.stop]) for each in self._segments_of]
        for number in self._last:
            self._hook_end(number)
        self.reached, self._doubtful = reached, doubtful

    def look(self, number: int) -> bool:
        """Whether segment ``number`` has all gradients that it waits for.

        Where it has not, the one that is likely to be the last of those missing is waited for:
        parameters are numbered in the order of a former backward.
        """
        came = set(map(id, self.log))
        missing = [
            index
            for index in self._ranges[number]
            if self.reached[index] and id(self._params[index]) not in came
        ]
        if missing:
            self._last[number] = missing[-1]
            self._hook_end(missing[-1])
        return not missing

    def has_unannounced(self) -> bool:
        """Whether something came that was not announced, or again."""
        came = set(map(id, self.log))
        return len(came) < len(self.log) or not came.issubset(map(id, self._expected))

    def is_usual(self) -> bool:
        """At the end: whether all that was announced has come, each once, in the usual order."""
        log, usual = self.log, self._usual
        return len(log) == len(usual) and (self._looked[0] == len(log) or all(map(is_, log, usual)))

    def arrivals(self) -> list[int]:
        """The log, by the numbers of the parameters."""
        return [self._number_of[id(param)] for param in self.log]

    def unannounced(self) -> list[tuple[int, int]]:
        """What came although it was not announced, or again: parameters, and when in the log."""
        found, seen = [], set()
        for position, number in enumerate(self.arrivals()):
            if number in seen or not self.reached[number]:
                found.append((number, position))
            seen.add(number)
        return found

    def learn(self) -> None:
        """The order of this backward is the one to expect of the next."""
        came = list(dict.fromkeys(self.arrivals()))
        others = set(self._order).difference(came)
        self._order = came + [number for number in self._order if number in others]
        self.reached = []  # looked at anew

    def number_of(self, param: Tensor) -> int:
        """The number of a parameter."""
        return self._number_of[id(param)]

    # Hooks are plain functions that refer to this object weakly: parameters and autograd nodes
    # hold them, and this object holds those, a cycle through C++ that the garbage collector could
    # not see.

    def _hook_end(self, number: int) -> None:
        """Have it seen when parameter ``number`` has its gradient and its hooks have run."""
        if number == _NEVER or number in self._end_hooks:
            return
        segment = self.segment_of[number]
        last, full_at, looked = self._last, self._full_at, self._looked
        log, usual, listener = self.log, self._usual, self._listener

        def gradient_is_final(*_: Any) -> None:
            if last[segment] != number or looked[0] == _NOBODY_LOOKS:
                return
            told = listener()
            if told is None:
                return
            start, end = looked[0], full_at[segment]
            if end > start and all(map(is_, log[start:end], usual[start:end])) and len(log) >= end:
                looked[0] = start = end
            if end <= start:
                told.on_segment_ready(segment)
            else:
                told.on_unusual_order(segment)

        self._end_hooks[number] = self.nodes[number].register_hook(gradient_is_final)


def _first_gradient(listener: weakref.ref[Reducer], param: Tensor) -> None:
    told = listener()
    if told is not None:
        told.on_first_gradient(param)


def _gradient_on_stream(
    log: list[Tensor],
    streams: list[Any],
    beside: list[Any],
    unheard: set[Tensor],
    param: Tensor,
) -> None:
    log.append(param)
    unheard.discard(param)
    stream = current_stream(param.device)
    if stream not in streams:
        streams.append(stream)
        beside[:] = streams[1:]


def _remove_all(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
