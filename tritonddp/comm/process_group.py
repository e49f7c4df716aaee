"""Buckets that go through the process group, each in the way that suits it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tritonddp._torch import backend_name
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.exchange import BucketExchange
from tritonddp.comm.all_reduce import AllReduce, ReduceToOwners
from tritonddp.comm.quantized import QuantizedAllReduce
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group

_OFF = ("0", "n", "no", "f", "false", "off", "")  # of an environment variable


class ProcessGroupTransport:
    """The transport through the process group; see :class:`Transport`."""

    averages = True

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group, self._counters = group, counters
        self._all_reduce = AllReduce(group, counters)
        self._quantized = QuantizedAllReduce(group, counters)
        self._announced: Callable[[BucketExchange], BucketExchange] | None = None

    def announce(self, announced: Callable[[BucketExchange], BucketExchange] | None) -> None:
        """Have ``announced`` put around exchanges that are made from now on; ``None`` for nothing.

        See :class:`tritonddp.comm.host.memory_exchange.Announced`.
        """
        self._announced = announced

    @property
    def ends_in_order(self) -> bool:
        """See :class:`Transport`. NCCL runs the collectives of a group on one stream.

        If the host waits for each of them, an error names the bucket.
        """
        return (
            self._goes_by_nccl and os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() in _OFF
        )

    @property
    def averages_in_place(self) -> bool:
        """See :class:`Transport`. NCCL divides by a power of two without rounding."""
        size = self._group.size
        return size & (size - 1) == 0 and self._goes_by_nccl

    @property
    def _goes_by_nccl(self) -> bool:
        group = self._group.process_group
        is_torchs = type(group) is dist.ProcessGroup
        return is_torchs and backend_name(group, torch.device("cuda")) == "nccl"

    def exchanges(self, buckets: Sequence[Bucket]) -> list[BucketExchange]:
        made = list(map(self._exchange, buckets))
        return made if self._announced is None else list(map(self._announced, made))

    def _exchange(self, bucket: Bucket) -> BucketExchange:
        if bucket.quantization is not None:
            return self._quantized
        if bucket.owned is not None:
            return ReduceToOwners(self._group, self._counters)
        return self._all_reduce
