"""Quantised gradients: an all-to-all, a sum on the rank that owns it, and an all-gather.

The second collective needs the result of the first. On a GPU both, and the kernel between them,
are enqueued at once on a stream of their own. Over gloo the host has to wait for the first. A
thread does that, bucket by bucket, so that no hook has to wait. There both are made of messages
with tags: a collective that a thread issues could be matched with one that the backward of another
rank issues (SyncBatchNorm). Two ranks over gloo need no second collective: see
``kernels/quantized/buffer.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from tritonddp._device import SideStreams
from tritonddp._torch import all_gather_single
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.all_reduce import Collective
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import close_connections
from tritonddp.coordination.group import Group
from tritonddp.coordination.point_to_point import PARTS, SUMS, MessagesUnderWay, tag_of
from tritonddp.kernels.dispatch import select_quantized
from tritonddp.kernels.quantized.buffer import QuantizedBuffer


class QuantizedAllReduce(Collective):
    """Sums a quantised bucket over the ranks, in quantised messages. One object serves all buckets.

    Each of W ranks owns 1/W of a bucket: it gets that part from all ranks, sums in rank order,
    quantises the sum and sends it to all. Every rank dequantises the same bytes, so all get the
    same bits.

    There are two collectives per bucket. In each a rank sends (W-1)/W of a message with one byte
    per element: together half the bytes of an all-reduce in bf16, see ``MessageLayout``. Two ranks
    on the CPU send each other their whole message instead, which is the same number of bytes, and
    both make the sum: without a thread, and without a second rounding.
    """

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group, self._counters = group, counters
        self._streams = SideStreams()
        self._queue: SimpleQueue[_Messages | None] | None = None  # of the thread

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        flat: QuantizedBuffer = bucket.flat
        is_direct = flat.message_layout.is_direct
        for message in (flat.received,) if is_direct else (flat.received, flat.gathered):
            self._counters.collective(message.nbytes, self._group.size)
        return self._start_on_host(flat) if flat.data.is_cpu else self._start_on_stream(flat)

    def _start_on_host(self, flat: QuantizedBuffer) -> Work:
        group = self._group.process_group
        messages = _Messages(flat, group, self._group.next_exchange())
        if flat.message_layout.is_direct:
            return messages  # nothing follows
        if self._queue is None:
            queue: SimpleQueue[_Messages | None] = SimpleQueue()
            # A daemon: when a rank fails, its exit must not wait for other ranks in this thread.
            thread = threading.Thread(
                target=_go_on, args=(queue,), name="tritonddp-quantized", daemon=True
            )
            thread.start()
            _threads[thread] = queue, weakref.ref(group)
            weakref.finalize(self, queue.put, None).atexit = False  # see _end_threads
            self._queue = queue
        self._queue.put(messages)
        return messages

    def _start_on_stream(self, flat: QuantizedBuffer) -> Work:
        device = flat.data.device
        group = self._group.process_group
        with self._streams.behind_current(device, *flat.memory):
            first = dist.all_to_all_single(flat.received, flat.message, group=group, async_op=True)
            assert first is not None
            first.wait()  # the stream waits, not the host
            select_quantized(device).reduce_parts(flat)
            return all_gather_single(flat.gathered, flat.reduced, group)


def _go_on(queue: SimpleQueue[_Messages | None]) -> None:
    """Main function of the thread. While it waits it must not keep buckets alive."""
    with torch.no_grad():
        while (messages := queue.get()) is not None:
            messages.go_on()
            del messages


# Threads that have not ended. An entry goes away in its thread, as that ends, when it can no longer
# be joined. So the entry must not hold a group: the thread would destroy it, perhaps while the
# interpreter exits.
_threads: weakref.WeakKeyDictionary[
    threading.Thread, tuple[SimpleQueue[_Messages | None], weakref.ref[dist.ProcessGroup]]
] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """End the threads before the interpreter exits.

    The exit stops daemon threads, and one that is inside C++ then aborts the process: a rank that
    fails while messages are in flight would seem to have crashed. If a thread waits for a rank that
    is gone, or does something else, closing the connections ends the wait.
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


class _Messages:
    """The :class:`Work` of one bucket over gloo. The constructor issues the first messages.

    ``number`` is that of the exchange, the same on all ranks.
    """

    def __init__(self, flat: QuantizedBuffer, group: dist.ProcessGroup, number: int) -> None:
        self._flat, self._group, self._number = flat, group, number
        self._error: BaseException | None = None
        self._is_reduced = threading.Event()  # set when the all-gather is issued, or on failure
        self._waiting = threading.Lock()
        size, rank = group.size(), group.rank()
        received = dict(enumerate(flat.received.view(size, -1)))
        self._sums: list[MessagesUnderWay] = []
        if flat.message_layout.is_direct:
            sent = dict.fromkeys(range(size), flat.message)  # it is this rank's row of `received`
            self._is_reduced.set()
        else:
            sent = dict(enumerate(flat.message.view(size, -1)))
            gathered = dict(enumerate(flat.gathered.view(size, -1)))
            # Receive already now: on a slow line the message that this rank is ready to receive
            # would queue behind the data it sends, and the others wait for that message.
            self._sums.append(MessagesUnderWay(group, tag_of(number, SUMS), gathered, {}))
        self._parts = MessagesUnderWay(group, tag_of(number, PARTS), received, sent)
        if self._sums:
            received[rank].copy_(sent[rank])

    def go_on(self) -> None:
        """Wait for the all-to-all, sum, issue the all-gather. Called in the thread."""
        flat, size, rank = self._flat, self._group.size(), self._group.rank()
        try:
            self._parts.wait()
            select_quantized(flat.data.device).reduce_parts(flat)
            sent = dict.fromkeys(range(size), flat.reduced)
            tag = tag_of(self._number, SUMS)
            self._sums.append(MessagesUnderWay(self._group, tag, {}, sent))
            flat.gathered.view(size, -1)[rank].copy_(flat.reduced)
        except BaseException as error:  # wait() raises it
            self._error = error
        self._is_reduced.set()

    def wait(self) -> None:
        flat = self._flat
        self._is_reduced.wait()
        with self._waiting:
            if self._error is None:
                try:
                    self._parts.wait()
                    for each in self._sums:
                        each.wait()
                    if flat.message_layout.is_direct:
                        select_quantized(flat.data.device).reduce_parts(flat)
                except RuntimeError as error:
                    self._error = error
        if self._error is not None:
            raise self._error

    def get_future(self) -> Future:
        """See :meth:`Work.get_future`. gloo has none for messages: a thread waits."""
        future: Future = Future()

        def complete() -> None:
            with contextlib.suppress(RuntimeError):  # wait() raises it for the reducer
                self.wait()
            future.set_result(None)

        threading.Thread(target=complete, daemon=True).start()
        return future
