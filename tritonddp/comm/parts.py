"""An exchange of messages over gloo in which each rank sums one part; see ``kernels/messages.py``.

The second round of messages needs the result of the first. So the host has to wait for the first
round. A thread does that, so that no hook has to wait. Messages have tags: a collective that a
thread issues could be matched with one that the backward of another rank issues (SyncBatchNorm).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.futures import Future

from tritonddp.coordination.failures import close_connections
from tritonddp.coordination.point_to_point import MessagesUnderWay, tag_of
from tritonddp.kernels.messages import Messages


class PartsExchange:
    """The :class:`Work` of one exchange. The constructor encodes and sends the first messages.

    Args:
        messages: messages of this rank. Nothing else may use them until :meth:`wait` has returned.
        group: process group over gloo.
        ranks: participating ranks of the group, in the order of the sum.
        tags: tags of the two rounds, identical on all ranks.
        thread: runs the steps after the first round.
    """

    def __init__(
        self,
        messages: Messages,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        tags: tuple[int, int],
        thread: ExchangeThread,
    ) -> None:
        self._messages, self._group, self._ranks = messages, group, ranks
        self._at, self._tag = ranks.index(group.rank()), tags[1]
        self._error: BaseException | None = None
        self._is_reduced = threading.Event()  # set when the second round is issued, or on failure
        self._waiting, self._is_over = threading.Lock(), False
        messages.encode()
        self._sums: list[MessagesUnderWay] = []
        if messages.gathered:
            # Post the receives now. gloo tells the senders that this rank is ready to receive; on a
            # slow link, that notice would queue after the data that this rank sends.
            gathered = dict(zip(ranks, messages.gathered, strict=True))
            self._sums.append(MessagesUnderWay(group, tags[1], gathered, {}))
        received = dict(zip(ranks, messages.received, strict=True))
        sent = dict(zip(ranks, messages.sent, strict=True))
        self._parts = MessagesUnderWay(group, tags[0], received, sent)
        if messages.gathered:
            _copy(messages.received[self._at], messages.sent[self._at])
            thread.go_on(self)
        else:
            self._is_reduced.set()

    def go_on(self) -> None:
        """Wait for the first round, sum, and issue the second round. Called in the thread."""
        messages = self._messages
        try:
            self._parts.wait()
            messages.reduce()
            sent = dict.fromkeys(self._ranks, messages.reduced)
            self._sums.append(MessagesUnderWay(self._group, self._tag, {}, sent))
            _copy(messages.gathered[self._at], messages.reduced)
        except BaseException as error:  # raised by wait()
            self._error = error
        self._is_reduced.set()

    def wait(self) -> None:
        """Wait until the sums are in the values.

        Raises:
            RuntimeError: a rank has exited, or did not send within the group's timeout.
        """
        self._is_reduced.wait()
        with self._waiting:
            if self._error is None and not self._is_over:
                try:
                    self._parts.wait()
                    for each in self._sums:
                        each.wait()
                    if not self._messages.gathered:
                        self._messages.reduce()
                    self._messages.decode()
                    self._is_over = True
                except RuntimeError as error:
                    self._error = error
        if self._error is not None:
            raise self._error

    def get_future(self) -> Future:
        """See :meth:`Work.get_future`. gloo has no futures for messages, so a thread waits."""
        future: Future = Future()

        def complete() -> None:
            with contextlib.suppress(RuntimeError):  # wait() raises it for the reducer
                self.wait()
            future.set_result(None)

        threading.Thread(target=complete, daemon=True).start()
        return future


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


class ExchangeThread:
    """A thread that continues exchanges, one after the other. It starts with the first one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._queue: SimpleQueue[PartsExchange | None] | None = None

    def go_on(self, exchange: PartsExchange) -> None:
        """Schedule a call of ``exchange.go_on()`` in the thread."""
        if self._queue is None:
            queue: SimpleQueue[PartsExchange | None] = SimpleQueue()
            # A daemon: when a rank fails, its exit must not wait for other ranks in this thread.
            thread = threading.Thread(
                target=_go_on, args=(queue,), name="tritonddp-exchange", daemon=True
            )
            thread.start()
            _threads[thread] = queue, self._group
            weakref.finalize(self, queue.put, None).atexit = False  # see _end_threads
            self._queue = queue
        self._queue.put(exchange)


def _go_on(queue: SimpleQueue[PartsExchange | None]) -> None:
    """Main function of the thread. It must not keep buckets alive while it waits."""
    with torch.no_grad():
        while (exchange := queue.get()) is not None:
            exchange.go_on()
            del exchange


# Threads that have not ended. A thread removes its entry as it ends, when it can no longer be
# joined. An entry must therefore not hold a group: the thread would destroy the group, perhaps
# while the interpreter exits.
_threads: weakref.WeakKeyDictionary[
    threading.Thread,
    tuple[SimpleQueue[PartsExchange | None], weakref.ref[dist.ProcessGroup]],
] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """End the threads before the interpreter exits.

    The exit stops daemon threads, and a thread inside C++ then aborts the process: a rank that
    fails while messages are in flight would seem to have crashed. If a thread waits for a rank that
    has exited or does something else, closing the connections ends the wait.
    """
    threads = list(_threads.items())
    for _, (queue, _) in threads:
        queue.put(None)
    for thread, (_, reference) in threads:
        thread.join(1.0)
        group = reference()
        if thread.is_alive() and group is not None:
            close_connections(group)
            thread.join(1.0)


def tags_of(number: int, first: int) -> tuple[int, int]:
    """Return the tags of exchange ``number``; its rounds are steps ``first`` and ``first + 1``."""
    return tag_of(number, first), tag_of(number, first + 1)
