"""Collectives, called directly on the ``ProcessGroup`` object as in stock DDP's reducer.

So any group works: one that is not registered with ``torch.distributed``, one made without a
default group, or one written in Python, which returns its own work objects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import ALL_TO_ALL_SINGLE, AllgatherOptions, all_gather_single

# torch's classes interpret this as "the timeout of the group".
_NO_TIMEOUT = timedelta(0)


class Work(Protocol):
    """The handle of a collective in flight, such as ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Block the current stream (CUDA) or the host (CPU) until the result is ready."""

    def get_future(self) -> torch.futures.Future:
        """Return a future that completes with the result. Only traces and comm hooks use it."""


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Work:
    """Start to reduce ``tensor``, which is not complex, in place over all ranks of ``group``."""
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    return _known(group.allreduce([tensor], options), tensor)


def sum_directly(tensor: Tensor, group: dist.ProcessGroup) -> Work:
    """Start to sum a small contiguous CPU tensor in place with :func:`gather_directly`.

    All ranks add in the same order. While in flight, this takes ``2 * world_size`` times the memory
    of the tensor.
    """
    total = tensor.view(-1)
    rows = total.new_empty(group.size(), len(total))
    return _DirectSum(gather_directly(rows, total, group), rows, total)


def gather_directly(rows: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Work:
    """Start to gather small CPU tensors: each rank sends its tensor directly to every other rank.

    gloo's collectives are rings of ``world_size - 1`` rounds; an all-reduce has two rings. In each
    round a thread of another process must wake up, which takes as long as sending a small tensor.
    Here there is one round. ``rows`` are contiguous, ``(world_size, n)``.
    """
    sent = torch.empty_like(rows).copy_(tensor)
    options = dist.AllToAllOptions()
    return getattr(group, ALL_TO_ALL_SINGLE)(rows, sent, [], [], options)


def reduce_scatter(output: Tensor, parts: list[Tensor], group: dist.ProcessGroup) -> Work:
    """Start to sum ``parts[r]`` over all ranks into ``output`` of rank ``r``."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
    return _known(group.reduce_scatter([output], [parts], options), output)


def broadcast(tensor: Tensor, group: dist.ProcessGroup, group_src: int) -> Work:
    """Start to broadcast ``tensor``, which is not complex, from rank ``group_src``, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = group_src
    return _known(group.broadcast([tensor], options), tensor)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather every rank's ``tensor``, in rank order, and wait for it."""
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    _known(group.allgather([gathered], [tensor], AllgatherOptions())).wait()
    return gathered


def begin_all_gather(rows: list[Tensor], tensor: Tensor, group: dist.ProcessGroup) -> Work:
    """Start to gather every rank's ``tensor`` in ``rows``, one row per rank."""
    return _known(group.allgather([rows], [tensor], AllgatherOptions()))


def all_gather_into(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Work:
    """Start to gather every rank's ``tensor`` in ``output``, concatenated in rank order."""
    if type(group) is dist.ProcessGroup:
        return all_gather_single(output, tensor, group)
    # Groups written in Python may support lists of tensors only.
    parts = list(output.chunk(group.size()))
    return _known(group.allgather([parts], [tensor], AllgatherOptions()))


def send(tensor: Tensor, group: dist.ProcessGroup, rank: int, tag: int) -> Work:
    """Start to send ``tensor`` to rank ``rank`` of the group."""
    return _known(group.send([tensor], rank, tag))


def receive(tensor: Tensor, group: dist.ProcessGroup, rank: int, tag: int) -> Work:
    """Start to receive a message of rank ``rank`` of the group into ``tensor``."""
    return _known(group.recv([tensor], rank, tag), tensor)


def _known(work: Any, tensor: Tensor | None = None) -> Work:
    """Wrap ``work`` so that it is a :class:`Work` whose result is in ``tensor``."""
    if work is None:  # the group has already waited
        return _Done()
    return _PythonWork(work, tensor) if isinstance(type(work).wait, FunctionType) else work


class _DirectSum:
    """The work of :func:`sum_directly`."""

    def __init__(self, work: Any, rows: Tensor, total: Tensor) -> None:
        self._work, self._total = work, total
        self._rows: Tensor | None = rows

    def wait(self) -> None:
        """Wait for the messages, and add them up, once."""
        self._work.wait()
        if self._rows is not None:
            first, second, *others = self._rows.unbind()
            torch.add(first, second, out=self._total)
            for other in others:
                self._total.add_(other)
            self._rows = None

    def get_future(self) -> torch.futures.Future:
        """Return the future of the messages."""
        return self._work.get_future()


class _Done:
    """The work of a collective that was complete when it returned."""

    def wait(self) -> None:
        """Return immediately."""

    def get_future(self) -> torch.futures.Future:
        """Return a completed future."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


class _PythonWork:
    """A work object whose class is written in Python.

    torch's C++ code calls ``wait`` of such an object with a timeout, and takes the result from
    ``get_future``, which may be another tensor than the input. This class does the same, and copies
    the result into ``tensor``. With ``None``, the group has already written the result to its
    output.
    """

    def __init__(self, work: Any, tensor: Tensor | None) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> None:
        """Wait, and copy the result into the tensor if it is elsewhere."""
        needs_timeout = _needs_timeout(type(self._work).wait)
        waited: Any = self._work.wait(timeout) if needs_timeout else self._work.wait()
        if hasattr(waited, "wait"):
            waited.wait()
        if isinstance(type(self._work).get_future, FunctionType):
            result, tensor = self._work.get_future().wait(), self._tensor
            while isinstance(result, Sequence) and len(result) == 1:
                result = result[0]
            if not isinstance(result, Tensor) or tensor is None:
                return
            if result.data_ptr() != tensor.data_ptr() or result.dtype is not tensor.dtype:
                tensor.copy_(result.reshape(tensor.shape))

    def get_future(self) -> torch.futures.Future:
        """Return the future of the wrapped object."""
        return self._work.get_future()


@functools.cache
def _needs_timeout(wait: FunctionType) -> bool:
    """Return True if this ``wait`` method requires a timeout."""
    try:
        inspect.signature(wait).bind(None)
    except TypeError:
        return True
    return False
