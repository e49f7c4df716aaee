"""On which stream autograd runs a node: that of its forward, behind whatever it gets gradients of.

An AccumulateGrad node has the stream that was current when it was made, and keeps it as long as
anybody holds the node. See ``Engine::evaluate_function`` and ``InputBuffer::add``.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from recording.recorder import Recorder, Timeline, tensors_in

_STREAM = "recorded stream"  # in a node's metadata


class _Backward:
    """One that runs."""

    def __init__(self, caller: Timeline) -> None:
        self.caller = caller
        self.used: set[Timeline] = {caller}
        # For a node, how far what it gets gradients of has come.
        self.behind: dict[Any, list[dict[Timeline, int]]] = defaultdict(list)


class Streams:
    """Those of the nodes of all graphs."""

    def __init__(self, device: Any) -> None:
        self._recorder: Recorder = device.recorder
        self._memory_of = device.memory_of
        self._running: list[_Backward] = []

    def note(self, result: Any) -> None:
        """Nodes of ``result`` that are new have been made just now."""
        nodes = []
        for each in tensors_in(result):
            with contextlib.suppress(RuntimeError):  # of a view that has no part in any graph
                nodes.append(each.grad_fn)
        while nodes:
            node = nodes.pop()
            if node is not None and _STREAM not in node.metadata:
                node.metadata[_STREAM] = self._recorder.current
                nodes += [each for each, _ in node.next_functions]

    @contextlib.contextmanager
    def backward(self, roots: Any) -> Iterator[None]:
        """Context: a backward from ``roots``."""
        roots = [roots] if isinstance(roots, Tensor) else roots
        nodes, left = {}, [root.grad_fn for root in roots if isinstance(root, Tensor)]
        while left:
            node = left.pop()
            if node is not None and node not in nodes:
                nodes[node] = None
                left += [each for each, _ in node.next_functions]
        running = _Backward(self._recorder.current)
        self._running.append(running)
        handles = []
        try:
            for node in nodes:
                handles.append(node.register_prehook(partial(self._begin, running, node)))
                handles.append(node.register_hook(partial(self._end, running, node)))
            yield
        finally:
            self._leave(running)
            self._running.pop()
            for handle in handles:
                handle.remove()

    def _begin(self, running: _Backward, node: Any, gradients: Sequence[Tensor | None]) -> None:
        stream = node.metadata.get(_STREAM, running.caller)
        if self._recorder.capturing and stream is self._recorder.default:
            self._recorder.races.append(f"{node.name()} of the default stream in a CUDA graph")
        for clock in running.behind.pop(node, None) or [running.caller.clock]:
            stream.join(clock)
        for gradient in gradients:  # as the engine does where they come from another stream
            with torch._C.DisableTorchFunction():
                is_sparse = gradient is not None and gradient.layout is torch.sparse_coo
                parts = [gradient._indices(), gradient._values()] if is_sparse else [gradient]  # type: ignore[union-attr]
                memories = [self._memory_of(each) for each in parts if each is not None]
            for memory in filter(None, memories):
                memory.guards.add(stream)
        running.used.add(stream)
        self._recorder.current = stream

    def _end(self, running: _Backward, node: Any, *_: Any) -> None:
        clock = dict(self._recorder.current.clock)
        for each, _ in node.next_functions:
            if each is not None:
                running.behind[each].append(clock)

    def _leave(self, running: _Backward) -> None:
        """The stream of the caller is behind all others."""
        for stream in running.used:
            running.caller.join(stream.clock)
        self._recorder.current = running.caller

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Context: the end of a backward, which the package queues, runs on its caller's stream."""
        name = "queue_end_of_backward"
        with contextlib.ExitStack() as stack:
            for module in [
                each for key, each in sys.modules.items() if key.startswith("tritonddp")
            ]:
                if hasattr(module, name):
                    queue = partial(self._queue, getattr(module, name))
                    stack.enter_context(mock.patch.object(module, name, queue))
            yield

    def _queue(self, queue: Callable[..., None], callback: Callable[[], None]) -> None:
        def on_callers_stream() -> None:
            if self._running:
                self._leave(self._running[-1])
            callback()

        queue(on_callers_stream)
