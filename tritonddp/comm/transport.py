"""How gradients, buffers and new values of one wrapper travel: its option ``transport``.

It is read here alone. Which exchange a bucket gets then follows from the bucket, see
``process_group.py`` and ``host/peer_memory.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tritonddp.buckets.formats import registering
from tritonddp.comm.host.peer_memory import PeerMemory
from tritonddp.comm.process_group import ProcessGroupTransport
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.peers import Peers

_PROCESS_GROUP, _PEER_MEMORY, _REGISTERED = "process_group", "peer_memory", "registered_memory"
_NAMES = ("auto", _PROCESS_GROUP, _PEER_MEMORY, _REGISTERED)


@dataclass(frozen=True)
class TransportChoice:
    """What a wrapper may use, checked."""

    is_registered: bool = False  # buckets lie in memory that the backend has registered
    shares_memory: bool = False  # ranks of a host may exchange through memory that they share
    is_required: bool = False  # they have to
    is_quantized: bool = False  # gradients do not, as they are quantised

    @classmethod
    def of(
        cls,
        transport: Any,
        group: dist.ProcessGroup,
        devices: Collection[torch.device],
        compression: object = None,
    ) -> TransportChoice:
        """From the constructor's ``transport``.

        Raises:
            ValueError: it is unknown, or unfit for these devices, this group or ``compression``.
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
                    "transport='registered_memory' is for buckets that NCCL sums, and "
                    "compression='int8' has them summed otherwise: leave one of them out"
                )
        if transport == _PEER_MEMORY and not is_on_cpu:
            raise ValueError(
                "transport='peer_memory' needs parameters on the CPU; on GPUs NCCL does the same: "
                "use 'auto' or 'registered_memory'"
            )
        if transport == _PEER_MEMORY and group.size() > 1 and not Group(group).sends_messages:
            raise ValueError(
                "transport='peer_memory' needs a process group of gloo, without "
                f"TORCH_DISTRIBUTED_DEBUG=DETAIL, but the group is {group.name()}: use 'auto'"
            )
        return cls(
            is_registered=transport == _REGISTERED,
            shares_memory=transport != _PROCESS_GROUP and is_on_cpu,
            is_required=transport == _PEER_MEMORY,
            is_quantized=compression is not None,
        )

    def memory(
        self, group: Group, by_group: ProcessGroupTransport, counters: Counters
    ) -> PeerMemory | None:
        """Moves buckets to memory of the host; ``None`` if they stay with ``by_group``."""
        if not self.shares_memory or self.is_quantized or not group.sends_messages:
            return None
        return PeerMemory(group, by_group, counters, self.is_required)

    def peers(self, group: Group) -> Peers | None:
        """The other ranks, if buffers and new values go through memory: alike on all ranks.

        So they do on one host, once the end of a reduced backward has connected the ranks.
        """
        peers = group.peers
        is_one_host = isinstance(peers, Peers) and len(peers.hosts) == 1
        return peers if self.shares_memory and is_one_host else None
