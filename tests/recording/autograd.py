"""Autograd nodes run on the stream of their forward, after the nodes that compute their inputs.

An AccumulateGrad node runs on the stream that was current when it was created. See
``Engine::evaluate_function`` and ``InputBuffer::add`` in torch.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from recording.recorder import Recorder, Timeline, tensors_in

_STREAM = "recorded stream"  # in the metadata of a node


def _nodes_of(value: Any, only_new: bool = False) -> dict[Any, None]:
    """The nodes of the graphs that compute the tensors in ``value``."""
    nodes: dict[Any, None] = {}
    left = []
    for each in tensors_in(value):
        with contextlib.suppress(RuntimeError):  # a view that is not part of any graph
            left.append(each.grad_fn)
    while left:
        node = left.pop()
        if node is None or node in nodes or (only_new and _STREAM in node.metadata):
            continue
        nodes[node] = None
        left += [each for each, _ in node.next_functions]
    return nodes


@dataclass
class _Backward:
    """A running backward."""

    caller: Timeline
    used: set[Timeline]  # the streams of its nodes
    # For each node, the clocks of the nodes that compute its inputs.
    before: dict[Any, list[dict[Timeline, int]]] = field(default_factory=lambda: defaultdict(list))


class Streams:
    """The streams of the nodes of all graphs."""

    def __init__(self, device: Any) -> None:
        self._recorder: Recorder = device.recorder
        self._device = device
        self._running: list[_Backward] = []

    def note(self, result: Any) -> None:
        """Assign the new nodes of ``result`` to the current stream."""
        for node in _nodes_of(result, only_new=True):
            node.metadata[_STREAM] = self._recorder.current

    @contextlib.contextmanager
    def backward(self, roots: Any) -> Iterator[None]:
        """Context: a backward from ``roots``."""
        caller = self._recorder.current
        running = _Backward(caller, {caller})
        self._running.append(running)
        with contextlib.ExitStack() as stack:
            stack.callback(self._running.pop)
            stack.callback(self._end, running)
            for node in _nodes_of(roots):
                before, after = partial(self._before, running), partial(self._after, running)
                stack.callback(node.register_prehook(partial(before, node)).remove)
                stack.callback(node.register_hook(partial(after, node)).remove)
            yield

    def _before(self, running: _Backward, node: Any, gradients: Sequence[Tensor | None]) -> None:
        stream = node.metadata.get(_STREAM, running.caller)
        if self._recorder.capturing and stream is self._recorder.default:
            self._recorder.races.append(f"{node.name()} of the default stream in a CUDA graph")
        for clock in running.before.pop(node, None) or [running.caller.clock]:
            stream.join(clock)
        # The engine records the use of gradients of other streams.
        self._device.guard([each for each in gradients if each is not None], stream)
        running.used.add(stream)
        self._recorder.current = stream

    def _after(self, running: _Backward, node: Any, *_: Any) -> None:
        clock = dict(self._recorder.current.clock)
        for each, _ in node.next_functions:
            if each is not None:
                running.before[each].append(clock)

    def _end(self, running: _Backward) -> None:
        """Let the stream of the caller wait for all other streams."""
        for stream in running.used:
            running.caller.join(stream.clock)
        self._recorder.current = running.caller

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Context: callbacks that the package queues run at the end, on the caller's stream."""
        name = "queue_end_of_backward"
        modules = [each for key, each in sys.modules.items() if key.startswith("tritonddp")]
        with contextlib.ExitStack() as stack:
            for module in modules:
                if hasattr(module, name):
                    queue = partial(self._queue, getattr(module, name))
                    stack.enter_context(mock.patch.object(module, name, queue))
            yield

    def _queue(self, queue: Callable[..., None], callback: Callable[[], None]) -> None:
        def on_callers_stream() -> None:
            if self._running:
                self._end(self._running[-1])
            callback()

        queue(on_callers_stream)
