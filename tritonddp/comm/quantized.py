"""Quantized gradients: an all-to-all, a sum on the rank that owns each part, and an all-gather.

The second collective needs the result of the first. On a GPU both collectives, and the kernel
between them, are enqueued together on a separate stream. For gloo see ``parts.py``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tritonddp._device import SideStreams
from tritonddp._torch import all_gather_single
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.all_reduce import Collective
from tritonddp.comm.parts import ExchangeThread, PartsExchange, tags_of
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.point_to_point import PARTS
from tritonddp.kernels.dispatch import select_quantized
from tritonddp.kernels.quantized.buffer import QuantizedBuffer
from tritonddp.kernels.quantized.messages import QuantizedMessages


class QuantizedAllReduce(Collective):
    """Sums a quantized bucket over the ranks in quantized messages. One object serves all buckets.

    Each of W ranks owns 1/W of a bucket: it gets that part from all ranks, sums in rank order,
    quantizes the sum and sends it to all ranks. Every rank dequantizes the same bytes, so all ranks
    get the same bits.

    There are two collectives per bucket. In each, a rank sends (W-1)/W of a message, with about one
    byte per element in int8: together half the bytes of an all-reduce in bf16, see
    ``MessageLayout``. Two ranks on the CPU send each other their whole message instead, which is
    the same number of bytes, and both compute the sum: without a thread or a second rounding.
    """

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group, self._counters = group, counters
        self._streams = SideStreams()
        self._thread = ExchangeThread(group.process_group)

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        flat: QuantizedBuffer = bucket.flat
        is_direct = flat.message_layout.is_direct
        for message in (flat.received,) if is_direct else (flat.received, flat.gathered):
            self._counters.collective(message.nbytes, self._group.size)
        return self._start_on_host(flat) if flat.data.is_cpu else self._start_on_stream(flat)

    def _start_on_host(self, flat: QuantizedBuffer) -> Work:
        group, tags = self._group, tags_of(self._group.next_exchange(), PARTS)
        ranks, messages = range(group.size), QuantizedMessages(flat)
        return PartsExchange(messages, group.process_group, ranks, tags, self._thread)

    def _start_on_stream(self, flat: QuantizedBuffer) -> Work:
        with self._streams.behind_current(flat.data.device, *flat.memory):
            return sum_messages(flat, self._group.process_group)


def sum_messages(flat: QuantizedBuffer, group: dist.ProcessGroup) -> Work:
    """Exchange the parts, sum them, and start to gather the sums, on the current stream."""
    first = dist.all_to_all_single(flat.received, flat.message, group=group, async_op=True)
    assert first is not None
    first.wait()  # the stream waits, not the host
    select_quantized(flat.data.device).reduce_parts(flat)
    return all_gather_single(flat.gathered, flat.reduced, group)
