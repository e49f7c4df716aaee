"""Buckets that go through the process group, each in the way that suits it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tritonddp._torch import backend_name
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.exchange import BucketExchange
from tritonddp.comm.all_reduce import AllReduce, DirectSum, ReduceToOwners
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
        self._direct_sum = DirectSum(group, counters)
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
        made: list[BucketExchange] = []
        to_end = 0  # bytes of a bucket and all behind it
        for bucket in reversed(buckets):
            to_end += bucket.nbytes
            made.append(self._exchange(bucket, to_end if bucket.index else bucket.nbytes))
        made.reverse()
        return made if self._announced is None else list(map(self._announced, made))

    def _exchange(self, bucket: Bucket, nbytes: int) -> BucketExchange:
        if bucket.quantization is not None:
            return self._quantized
        if bucket.owned is not None:
            return ReduceToOwners(self._group, self._counters)
        # The limit holds for the last buckets together, whose exchange no backward hides, so that
        # memory is bounded; and for the first bucket, whose headers show whether the ranks agree,
        # alone.
        if nbytes <= self._group.most_direct and bucket.params[0].is_cpu:
            return self._direct_sum
        return self._all_reduce
