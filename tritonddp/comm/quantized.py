"""Quantised gradients: an all-to-all, a sum on the rank that owns it, and an all-gather.

The second collective depends on the first one's result. On a GPU both, and the kernel between
them, are enqueued at once on a stream of their own. Over gloo nobody but the host can wait for the
first: a thread does, so that no hook has to, and goes through the buckets in order. Both are made
of messages there, which are matched by their tags: a collective that a thread issues would be
taken for one that the backward issues on another rank (SyncBatchNorm).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.futures import Future

from tritonddp._torch import all_gather_single
from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.comm.point_to_point import receive, send
from tritonddp.comm.reduction import AllReduce
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import RollCall, close_connections
from tritonddp.kernels.dispatch import select_quantized
from tritonddp.kernels.quantized.buffer import QuantizedBuffer

# Tags of messages: two for each bucket, from here on. So many buckets may be under way.
_FIRST_TAG = 0x7D100000
_IN_FLIGHT = 4_096


class QuantizedAllReduce(AllReduce):
    """Mean over ranks by a quantised sum, of the buckets that have a quantisation.

    The others are reduced as :class:`AllReduce` does. Of W ranks each owns 1/W of a bucket: it gets
    that part of all ranks, sums in rank order, quantises the sum and sends it to all. Every rank
    makes its gradients of the same bytes, so that all have the same bits.

    Two collectives a bucket. They send together (W-1)/W of a message of one byte an element to all
    ranks, and as much for the sums, half the bytes of an all-reduce in bf16; see
    :class:`~tritonddp.kernels.quantized.buffer.MessageLayout`.

    Attributes:
        plain: for gradients that no backward has put into a bucket, see :class:`Reduction`.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, counters: Counters, roll_call: RollCall
    ) -> None:
        super().__init__(process_group, counters, roll_call)
        # Their buckets are made for the occasion, and have no residuals.
        self._plain = AllReduce(process_group, counters, roll_call)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._queue: SimpleQueue[_Exchange | None] | None = None  # of the thread

    @property
    def plain(self) -> AllReduce:
        """See :class:`Reduction`."""
        return self._plain

    def fill(self, bucket: Bucket, segment: Segment, used: Sequence[bool]) -> None:
        """See :meth:`Reduction.fill`."""
        if bucket.quantization is not None:
            bucket.quantization.rescale(self._unit)
        super().fill(bucket, segment, used)

    def finish(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`Reduction.finish`."""
        self.discard(bucket, work)
        factor = self._factor
        if isinstance(flat := bucket.flat, QuantizedBuffer):
            factor = select_quantized(flat.data.device, flat.numbers).receive(flat, factor)
        bucket.unflatten(factor)

    def settle(self) -> None:
        """See :meth:`Reduction.settle`."""
        super().settle()
        self._plain.settle()

    def _issue(self, bucket: Bucket) -> Work:
        flat = bucket.flat
        if not isinstance(flat, QuantizedBuffer):
            return super()._issue(bucket)
        for message in (flat.message, flat.gathered):
            self._counters.collective(message.nbytes, self._group.size())
        try:
            if flat.data.device.type == "cpu":
                return self._start_in_thread(flat)
            return self._start_on_stream(flat)
        except RuntimeError as error:
            raise self._explained(bucket, error) from error

    def _start_in_thread(self, flat: QuantizedBuffer) -> Work:
        exchange = _Exchange(flat, self._group)
        if self._queue is None:
            queue: SimpleQueue[_Exchange | None] = SimpleQueue()
            # A daemon: a rank that fails must not wait there for others when it ends.
            thread = threading.Thread(
                target=_go_on, args=(queue,), name="tritonddp-quantized", daemon=True
            )
            thread.start()
            _threads[thread] = queue, weakref.ref(self._group)
            weakref.finalize(self, queue.put, None).atexit = False  # see _end_threads
            self._queue = queue
        self._queue.put(exchange)
        return exchange

    def _start_on_stream(self, flat: QuantizedBuffer) -> Work:
        device = flat.data.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            first = dist.all_to_all_single(
                flat.received, flat.message, group=self._group, async_op=True
            )
            assert first is not None
            first.wait()  # the stream does, not the host
            select_quantized(device, flat.numbers).reduce_parts(flat)
            second = all_gather_single(flat.gathered, flat.reduced, self._group)
        # They may be let go before the stream is through, by a reducer that is.
        for memory in (flat.message, flat.received, flat.flags):
            memory.record_stream(stream)
        if flat.residuals is not None:
            flat.residuals.reduced.record_stream(stream)
        return second


def _go_on(queue: SimpleQueue[_Exchange | None]) -> None:
    """The thread. It holds nothing while it waits, or buckets would outlive their reducers."""
    with torch.no_grad():
        while (exchange := queue.get()) is not None:
            exchange.go_on()
            del exchange


# Those that have not ended. A thread takes its entry out as it ends, after anybody can wait for it:
# a group that went with the entry would be taken apart there, also while the interpreter ends.
_threads: weakref.WeakKeyDictionary[
    threading.Thread, tuple[SimpleQueue[_Exchange | None], weakref.ref[dist.ProcessGroup]]
] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Before the interpreter goes: a thread that it stops in the midst of C++ aborts the process.

    A rank that fails while messages are on their way would seem to have crashed. Where a thread
    waits for a rank that is gone, or went on with something else, it is told not to.
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


# Numbers of the exchanges that this rank has made in a group: as on all of its ranks.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class _Exchange:
    """The work on one bucket over gloo: its :class:`Work`. The all-to-all is issued at once.

    Args:
        flat: filled.
        group: the ranks.
    """

    def __init__(self, flat: QuantizedBuffer, group: dist.ProcessGroup) -> None:
        self._flat = flat
        self._group = group
        number = next(_numbers.setdefault(group, count())) % _IN_FLIGHT
        self._tag = _FIRST_TAG + 2 * number
        self._received = flat.received.view(group.size(), -1)
        self._gathered = flat.gathered.view(group.size(), -1)
        self._works = receive(self._received, group, self._tag)
        # Not only when the sums are there: on a slow line the word that this rank is ready would
        # wait behind what it sends, and the others wait for it.
        self._sums = receive(self._gathered, group, self._tag + 1)
        outgoing = flat.message.view(group.size(), -1)
        self._works += send(outgoing, self._received, group, self._tag)
        self._error: BaseException | None = None
        self._is_reduced = threading.Event()  # and the all-gather issued; or it has failed
        self._waiting = threading.Lock()

    def go_on(self) -> None:
        """Wait for the all-to-all, sum, issue the all-gather. In the thread."""
        flat = self._flat
        try:
            self._wait_for_works()
            select_quantized(flat.data.device, flat.numbers).reduce_parts(flat)
            outgoing = flat.reduced.view(1, -1).expand(self._group.size(), -1)
            self._works = self._sums
            self._works += send(outgoing, self._gathered, self._group, self._tag + 1)
        except BaseException as error:  # for whoever waits
            self._error = error
        self._is_reduced.set()

    def _wait_for_works(self) -> None:
        while self._works:  # each can be waited for but once, also after a KeyboardInterrupt
            self._works.pop(0).wait()

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        self._is_reduced.wait()
        with self._waiting:
            if self._error is None:
                try:
                    self._wait_for_works()
                except RuntimeError as error:
                    self._error = error
        if self._error is not None:
            raise self._error

    def get_future(self) -> Future:
        """See :meth:`Work.get_future`. gloo has none for messages: a thread waits."""
        future: Future = Future()

        def complete() -> None:
            with contextlib.suppress(RuntimeError):  # for whoever waits
                self.wait()
            future.set_result(None)

        threading.Thread(target=complete, daemon=True).start()
        return future
