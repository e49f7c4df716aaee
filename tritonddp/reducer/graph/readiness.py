"""Record which gradients are ready: C code writes a log, one Python hook per segment reads it.

A *segment* is a range of parameters of one bucket that are flattened together; on a GPU it is the
whole bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from operator import is_
from typing import Any, Protocol, cast

from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import current_stream, join_streams
from tritonddp._torch import captures_leaves, register_post_accumulate_grad_hook, will_execute
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.reduction import Reduction
from tritonddp.reducer.graph.participation import (
    accumulating_nodes,
    as_trainable,
    gradient_nodes,
)

# Position in the log for a segment without a hook: it is packed at the end of the backward.
_NEVER = -1
# Hooks are inactive: the backward only accumulates, or its buckets are launched at its end.
_NOBODY_LOOKS = -1


class Listener(Protocol):
    """Receiver of a tracker's callbacks: a driver."""

    def on_first_gradient(self, param: Tensor) -> None:
        """Handle the first gradient of a backward that did not begin at an output of the module."""

    def on_gradients(self) -> None:
        """Handle the first gradient after :meth:`ReadyTracker.tell_first`."""

    def on_segment_ready(self, segment_index: int) -> None:
        """Handle a segment whose gradients are all ready."""

    def on_unusual_order(self, segment_index: int) -> None:
        """Handle gradients that became ready in an order that differs from the last one."""


class GradientLog:
    """Log of the parameters in the order of their gradients, written without Python code.

    All parameters have the same hook: a ``functools.partial`` that C calls and whose function can
    be replaced. During a backward the function is ``list.append``. Between backwards it calls the
    driver: a gradient that becomes ready then is the first of a backward that does not begin at an
    output of the module.

    Attributes:
        entries: the parameters.
        set_hook: switches the hook to one of the next three states. Held here, because the hook
            may be replaced while it runs.
        idle: state in which the hook calls the driver.
        writing: state in which it appends to the entries.
        hearing: state in which it also notes the stream of the gradient.
        streams: on a GPU, the known streams of the autograd nodes. A node runs on the stream
            that was current when it was created, by this package or earlier by other code that
            still holds it.
        other_streams: all streams except the first.
        unheard: the parameters on a GPU whose stream is not known.
        remove: removes the hook.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        entries: list[Tensor],
        listener: weakref.ref[Listener],
    ) -> None:
        self.entries = entries
        self.streams: list[Any] = []
        self.other_streams: list[Any] = []
        self.unheard: set[Tensor] = {param for param in params if param.is_cuda}
        heard = (self.entries, self.streams, self.other_streams, self.unheard)
        self.idle: tuple[Any, ...] = (_first_gradient, (listener,), {}, None)
        self.writing: tuple[Any, ...] = (self.entries.append, (), {}, None)
        self.hearing: tuple[Any, ...] = (_gradient_on_stream, heard, {}, None)
        self._listener = listener
        self._hook = cast(Any, partial(_first_gradient, listener))
        self.set_hook: Callable[[tuple[Any, ...]], None] = self._hook.__setstate__
        # Parameters may outlive the wrapper. Their autograd nodes and the end hooks do not.
        self.remove = weakref.finalize(self, _Hooks(self._hook, params).remove)
        self.remove.atexit = False

    def note(self, param: Tensor) -> None:
        """Record that the gradient of ``param`` is ready, because its hook was still idle."""
        if param in self.unheard:
            _gradient_on_stream(self.entries, self.streams, self.other_streams, self.unheard, param)
        else:
            self.entries.append(param)

    def tell_first(self, usual: tuple[Any, ...]) -> None:
        """Call :meth:`Listener.on_gradients` at the next gradient, then restore the usual hook."""
        self.set_hook((_gradient_tells, (self._hook, usual, self._listener), {}, None))

    def inherit(self, former: GradientLog, kept: Collection[Tensor]) -> None:
        """Take over the streams of ``former`` for ``kept``, whose nodes are the same."""
        self.streams[:], self.other_streams[:] = former.streams, former.other_streams
        self.unheard.difference_update(set(kept).difference(former.unheard))


class ReadyTracker:
    """Track which gradients of a backward are ready, and call back when a segment is full.

    In a steady step no Python runs for a gradient: see :class:`GradientLog`. In each segment, the
    parameter whose gradient is expected last has also an *end hook* in Python, on its node.
    The engine runs it after all hooks of the user on the parameter. The end hook compares the log
    with the log of the last backward, in C. If they differ, it looks for missing gradients of the
    segment. If there are any, one of their parameters gets an end hook, and the segment waits for
    it. If the order changes in each step, end hooks are added until each parameter has one.

    Args:
        bucket_set: buckets of the parameters; the parameters of a segment are adjacent. Ready
            gradients are written to its record of use.
        listener: the driver that is called back; held by a weak reference.
    """

    def __init__(self, bucket_set: BucketSet, listener: Listener) -> None:
        params, ranges, self._use = bucket_set.params, bucket_set.ranges, bucket_set.use
        # Holding AccumulateGrad nodes keeps them, and the hooks registered on them, alive: autograd
        # itself refers to them only weakly.
        self.nodes = accumulating_nodes(params)
        self._listener = weakref.ref(listener)
        self.gradients = GradientLog(params, self._use.ready, self._listener)
        self._writes = self.gradients.writing  # what the hook does in the next backward
        # The expected and awaited parameters for which the lists below were built.
        self._made_for: tuple[Sequence[bool], Collection[int]] = (), ()
        self.pending: list[int] = []  # for each bucket, how many segments wait for gradients
        self._params = list(params)
        self._ranges = ranges
        self._segments_of = bucket_set.segments_of
        # For each parameter, the index of its segment.
        self.segment_of = [index for index, each in enumerate(ranges) for _ in each]
        self._index_of = self._use.index_of
        self._order = list(range(len(params)))  # the last known order of gradients, by indices
        # Read by the end hooks; these lists are changed in place.
        self._usual: list[Tensor] = []  # the expected log
        self._full_at = [_NEVER] * len(ranges)  # for each segment, length of the log when full
        self._last = [_NEVER] * len(ranges)  # for each segment, the parameter expected last
        self._looked = [_NOBODY_LOOKS]  # length of the part of the log that is as expected
        self._end_hooks: dict[int, Any] = {}
        # In a backward with a different order: length of the inspected part of the log, which
        # parameters are in it, and for each segment the expected parameters that are not in it.
        self._seen = 0
        self._is_ready = bytearray()
        self._awaited: list[list[int]] = []
        self.has_unannounced = False  # an unexpected gradient is ready, or one is ready again

    def query(self) -> list[bool] | None:
        """Return for each parameter whether the running backward on this thread will reach it.

        No graph is walked and no output is read: the engine has just computed which nodes it will
        run, so the answer is right for any loss. It does not include inner backwards of reentrant
        checkpoints. Call this method from a hook only.

        Returns:
            ``None`` for ``torch.autograd.grad`` with respect to some of the parameters.
        """
        try:
            return list(map(will_execute, self.nodes))
        except RuntimeError as error:
            if captures_leaves(error):
                return None
            raise

    def begin(self, looks: bool) -> None:
        """Begin a backward; its expected and awaited parameters are in the record of use.

        With ``looks``, call back when a segment is full. Segments with awaited parameters are
        packed at the end.
        """
        self._use.ready.clear()
        if (self._use.expected, self._use.awaited) != self._made_for:
            self._expect(self._use.expected, self._use.awaited)
        self.gradients.set_hook(self._writes)
        self._looked[0], self._seen = 0 if looks else _NOBODY_LOOKS, 0

    def tell_first(self) -> None:
        """Call :meth:`Listener.on_gradients` when the next gradient is ready.

        Buckets that wait for no gradient are launched then, as in stock DDP: the module may run
        collectives before its first gradient.
        """
        self.gradients.tell_first(self._writes)

    def stop(self) -> bool:
        """End the backward: the next gradient begins another one.

        Returns:
            Whether each announced gradient was ready exactly once, in the usual order.
        """
        ready, usual, looked = self._use.ready, self._usual, self._looked[0]
        self.gradients.set_hook(self.gradients.idle)
        self._looked[0], self._writes = _NOBODY_LOOKS, self.gradients.writing
        return len(ready) == len(usual) and (looked == len(ready) or all(map(is_, ready, usual)))

    def join_streams(self, segment_index: int | None = None) -> None:
        """Make the current stream wait for the gradients of a segment, or for all gradients.

        In a hook, autograd has synchronized the current stream with the stream of that node only.
        At the end of a backward it has synchronized it with all streams. But the allocator reserves
        the memory of a gradient for the stream of its node only.
        """
        params = self._params
        if segment_index is not None:
            params = [params[each] for each in self._ranges[segment_index]]
        join_streams(self.gradients.streams, [param.grad for param in params])

    def inherit(self, former: ReadyTracker) -> None:
        """Take over the streams of the nodes that ``former`` also holds."""
        held, both = set(self.nodes), zip(former._params, former.nodes, strict=False)
        self.gradients.inherit(former.gradients, [param for param, node in both if node in held])

    def is_outdated(self, indices: Collection[int]) -> bool:
        """Return True if one of these parameters has a new autograd node, without our hooks.

        That happens after its ``.data`` had another dtype or device, even if it was converted back,
        as by ``module.double()`` followed by ``module.float()``.
        """
        wanted = [index for index in indices if self._params[index].requires_grad]
        now = gradient_nodes([self._params[index] for index in wanted])
        return not all(map(is_, now, map(self.nodes.__getitem__, wanted)))

    def remove(self) -> None:
        """Remove all hooks."""
        self.gradients.remove()
        for handle in self._end_hooks.values():
            handle.remove()
        self._end_hooks.clear()

    def let_go(self) -> None:
        """Remove all hooks permanently, and release the autograd nodes."""
        self.remove()
        self.nodes = []

    def _expect(self, expected: Sequence[bool], awaited: Collection[int]) -> None:
        self._made_for = (), ()  # not valid until the end of this method
        usual = [index for index in self._order if expected[index]]
        self._usual[:] = map(self._params.__getitem__, usual)
        self._full_at[:] = self._last[:] = [_NEVER] * len(self._ranges)
        ends = dict(zip(map(self.segment_of.__getitem__, usual), count(1)))
        for segment, position in ends.items():
            self._full_at[segment], self._last[segment] = position, usual[position - 1]
        if self.gradients.unheard and not self.gradients.unheard.isdisjoint(self._usual):
            self._writes = self.gradients.hearing
        waits = [index != _NEVER for index in self._last]
        for index in awaited:
            segment = self.segment_of[index]
            self._last[segment], waits[segment] = _NEVER, True
        self.pending = [sum(waits[each.start : each.stop]) for each in self._segments_of]
        for index in self._end_hooks.keys() - self._last:
            self._end_hooks.pop(index).remove()
        for index in self._last:
            self._hook_end(index)
        self._made_for = expected, awaited

    def look(self, segment: int) -> bool:
        """Return True if all expected gradients of this segment are ready. One caller at a time.

        Otherwise add an end hook for one of the pending gradients. The first time, this is the one
        with the highest index, since parameters are numbered in the order of an earlier backward.
        Later, it is the one in the middle, so that even an unrelated order takes few calls.
        """
        is_first, expected, ready = not self._seen, self._use.expected, self._use.ready
        if is_first:
            self._is_ready, self.has_unannounced = bytearray(len(self._params)), False
            self._awaited = [[n for n in each if expected[n]] for each in self._ranges]
        is_ready, place, self._seen = self._is_ready, self._seen, len(ready)
        for key in map(id, ready[place : self._seen]):
            index = self._index_of[key]
            self.has_unannounced |= bool(is_ready[index]) or not expected[index]
            is_ready[index] = True
        pending = [index for index in self._awaited[segment] if not is_ready[index]]
        self._awaited[segment] = pending
        if pending:
            self._last[segment] = pending[-1 if is_first else len(pending) // 2]
            self._hook_end(self._last[segment])
        return not pending

    def note_unannounced(self, reduction: Reduction) -> None:
        """Note gradients of inner backwards, which the engine has not announced.

        Raises:
            RuntimeError: a gradient was ready after its bucket had been launched.
        """
        too_late = [
            index
            for index, place in self._use.take_unannounced()
            if place >= reduction.packed[self.segment_of[index]] - 1 >= 0
        ]
        if too_late:
            self.learn()
            bucket, _ = reduction.bucket_set.segments[self.segment_of[too_late[0]]]
            raise RuntimeError(
                f"{reduction.where}: the gradient of {reduction.bucket_set.names[too_late[0]]!r} "
                f"became ready after its bucket {bucket.index} had been flattened or skipped. "
                "Either it comes from an inner backward (torch.utils.checkpoint with "
                "use_reentrant=True) for the first time, or the unused parameter was converted to "
                "another dtype or device and back. Discard the gradients of this step on all ranks "
                "and continue training: tritonddp waits for this gradient from the next step on. "
                "For checkpoints, use_reentrant=False avoids this error."
            )

    def learn(self) -> None:
        """Expect the order of this backward in the next one."""
        ready = list(dict.fromkeys(self._use.ready_indices()))
        others = set(self._order).difference(ready)
        self._order = ready + [index for index in self._order if index in others]
        self._made_for = (), ()  # so that the next begin() calls _expect()

    # Hooks are plain functions with a weak reference to this object. Otherwise there would be a
    # cycle through C++ that the garbage collector cannot see: parameters and autograd nodes hold
    # the hooks, and this object holds the parameters and nodes.

    def _hook_end(self, param_index: int) -> None:
        """Add an end hook, which runs when the gradient is ready, after the parameter's hooks."""
        if param_index == _NEVER or param_index in self._end_hooks:
            return
        segment = self.segment_of[param_index]
        last, full_at, looked = self._last, self._full_at, self._looked
        ready, usual, listener = self._use.ready, self._usual, self._listener

        def gradient_is_final(_: Any, __: Any) -> None:
            if last[segment] != param_index or looked[0] == _NOBODY_LOOKS:
                return
            driver = listener()
            if driver is None:
                return
            start, end = looked[0], full_at[segment]
            if (
                end > start
                and len(ready) >= end
                and all(map(is_, ready[start:end], usual[start:end]))
            ):
                looked[0] = start = end
            if end <= start:
                driver.on_segment_ready(segment)
            else:
                driver.on_unusual_order(segment)

        self._end_hooks[param_index] = self.nodes[param_index].register_hook(gradient_is_final)


class WatchedParameters:
    """Parameters in no bucket, whose hooks report a backward that reaches no other parameter.

    ``reference`` is a weak reference to the :class:`Listener` that is called.
    """

    def __init__(self, reference: weakref.ref[Any]) -> None:
        self._hook: Any = partial(_first_gradient, reference)
        self._hooks = _Hooks(self._hook, ())

    def watch(self, params: Sequence[Parameter]) -> None:
        """Watch these parameters, trainable or frozen, and no others."""
        self._hooks.remove()
        with as_trainable(params):
            self._hooks = _Hooks(self._hook, params)


def _first_gradient(listener: weakref.ref[Listener], param: Tensor) -> None:
    driver = listener()
    if driver is not None:
        driver.on_first_gradient(param)


def _gradient_tells(
    hook: Any, usual: tuple[Any, ...], listener: weakref.ref[Listener], param: Tensor
) -> None:
    hook.__setstate__(usual)
    hook(param)
    driver = listener()
    if driver is not None:
        driver.on_gradients()


def _gradient_on_stream(
    log: list[Tensor],
    streams: list[Any],
    others: list[Any],
    unheard: set[Tensor],
    param: Tensor,
) -> None:
    log.append(param)
    unheard.discard(param)
    stream = current_stream(param.device)
    if stream not in streams:
        streams.append(stream)
        others[:] = streams[1:]


class _Hooks:
    """A hook that is registered on each of ``params``."""

    def __init__(self, hook: Any, params: Sequence[Parameter]) -> None:
        # Two lists take 16 bytes for each parameter, a handle takes 64.
        self._tables: list[dict[int, Any]] = []
        self._keys: list[int] = []
        for param in params:
            table, key = register_post_accumulate_grad_hook(param, hook)
            self._tables.append(table)
            self._keys.append(key)

    def remove(self) -> None:
        for table, key in zip(self._tables, self._keys, strict=False):
            table.pop(key, None)
