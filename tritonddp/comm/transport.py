"""The option ``transport``: how gradients, buffers and new values of one wrapper are sent.

Only this module interprets the option. The exchange of a bucket then depends on the properties of
the bucket: here, and in ``host/peer_memory.py`` for buckets that move into host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tritonddp._torch import backend_name
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.exchange import BucketExchange, HostMemory
from tritonddp.buckets.formats import registering
from tritonddp.buckets.wire_formats import QuantizedInterHost
from tritonddp.comm.all_reduce import AllReduce, ReduceToOwners
from tritonddp.comm.host.peer_memory import PeerMemory
from tritonddp.comm.quantized import QuantizedAllReduce
from tritonddp.comm.two_levels import GpuHosts
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.peers import Peers

_AUTO, _PROCESS_GROUP = "auto", "process_group"
_PEER_MEMORY, _REGISTERED = "peer_memory", "registered_memory"
_NAMES = (_AUTO, _PROCESS_GROUP, _PEER_MEMORY, _REGISTERED)
_OFF = ("0", "n", "no", "f", "false", "off", "")  # values of an environment variable


@dataclass(frozen=True)
class TransportChoice:
    """The transports that a wrapper may use, validated."""

    is_registered: bool = False  # buckets are in memory that the backend has registered
    shares_memory: bool = False  # ranks of a host may use shared memory
    is_required: bool = False  # ranks of a host must use shared memory
    may_cut: bool = True  # if quantized between hosts, sum in full precision within a host

    @classmethod
    def of(
        cls,
        transport: Any,
        group: dist.ProcessGroup,
        devices: Collection[torch.device],
        compression: object = None,
    ) -> TransportChoice:
        """Create the choice from the constructor's ``transport``.

        Raises:
            ValueError: it is unknown, or unsuitable for these devices, this group or
                ``compression``.
        """
        if not isinstance(transport, str) or transport not in _NAMES:
            raise ValueError(
                f"transport should be one of {', '.join(map(repr, _NAMES))}, got {transport!r}"
            )
        is_on_cpu = all(device.type == "cpu" for device in devices)
        if transport == _REGISTERED:
            for device in sorted(set(devices), key=str):
                registering(group, device)
            if compression is not None:
                raise ValueError(
                    "transport='registered_memory' and compression are mutually exclusive: with "
                    "compression NCCL does not sum the buckets. Remove one of them"
                )
        if transport == _PEER_MEMORY and not is_on_cpu:
            raise ValueError(
                "transport='peer_memory' requires parameters on the CPU. On GPUs NCCL uses peer "
                "memory itself. Use 'auto' or 'registered_memory'"
            )
        if transport == _PEER_MEMORY and group.size() > 1 and not Group(group).sends_messages:
            raise ValueError(
                "transport='peer_memory' requires a gloo process group without "
                f"TORCH_DISTRIBUTED_DEBUG=DETAIL, but the group is {group.name()}. Use 'auto'"
            )
        return cls(
            is_registered=transport == _REGISTERED,
            shares_memory=transport in (_AUTO, _PEER_MEMORY) and is_on_cpu,
            is_required=transport == _PEER_MEMORY,
            may_cut=transport == _AUTO,
        )

    def of_wrapper(
        self, group: Group, counters: Counters, device: torch.device, quantizes: bool
    ) -> tuple[ProcessGroupTransport, HostMemory | None]:
        """Return the transport, and the object that lets ranks of a host share memory, or ``None``.

        Args:
            device: device of the module.
            quantizes: ``compression`` is enabled.
        """
        by_group = ProcessGroupTransport(group, counters)
        is_on_nccl = device.type == "cuda" and by_group.goes_by_nccl
        if quantizes and is_on_nccl and self.may_cut and group.has_subgroups:
            by_group.hosts = GpuHosts(group, device, counters)
            return by_group, by_group.hosts
        if not self.shares_memory or not group.sends_messages:
            return by_group, None
        return by_group, PeerMemory(group, by_group, counters, self.is_required)

    def peers(self, group: Group) -> Peers | None:
        """Return the other ranks if buffers and new values can use shared memory, else ``None``.

        All ranks agree. They can use it on one host, once a reduced backward has connected them.
        """
        peers = group.peers
        is_one_host = isinstance(peers, Peers) and not peers.has_line
        return peers if self.shares_memory and is_one_host else None


class ProcessGroupTransport:
    """The transport through the process group; see :class:`Transport`.

    The exchange of each bucket depends on its wire format and owners.
    """

    averages = True

    def __init__(self, group: Group, counters: Counters) -> None:
        self._group, self._counters = group, counters
        self._all_reduce = AllReduce(group, counters)
        self._quantized = QuantizedAllReduce(group, counters)
        self.hosts: GpuHosts | None = None  # if there are GPUs on several hosts
        self._announced: Callable[[BucketExchange], BucketExchange] | None = None

    def announce(self, announced: Callable[[BucketExchange], BucketExchange] | None) -> None:
        """Wrap exchanges that are made from now on with ``announced``; ``None`` wraps nothing.

        See :class:`tritonddp.comm.host.memory_exchange.Announced`.
        """
        self._announced = announced

    @property
    def ends_in_order(self) -> bool:
        """See :class:`Transport`. NCCL runs the collectives of a group on one stream.

        With blocking wait the host waits for each bucket, so that an error names the bucket.
        """
        return self.goes_by_nccl and os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() in _OFF

    @property
    def goes_by_nccl(self) -> bool:
        """True if this is torch's own process group class and NCCL reduces its CUDA tensors."""
        group = self._group.process_group
        is_torchs = type(group) is dist.ProcessGroup
        return is_torchs and backend_name(group, torch.device("cuda")) == "nccl"

    def exchanges(self, buckets: Sequence[Bucket]) -> list[BucketExchange]:
        made = list(map(self._exchange, buckets))
        return made if self._announced is None else list(map(self._announced, made))

    def _exchange(self, bucket: Bucket) -> BucketExchange:
        if bucket.wire.is_message:
            return self._quantized
        if self.hosts is not None and isinstance(bucket.wire, QuantizedInterHost):
            return self.hosts.serving(bucket)
        if bucket.owned is not None:
            return ReduceToOwners(self._group, self._counters)
        return self._all_reduce
