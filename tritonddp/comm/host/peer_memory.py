"""Moves the buckets of a wrapper into memory that the ranks of this host share.

gloo moves each byte through the kernel several times, even between two processes of one host. Here
each rank packs (flattens) its buckets into memory that the other ranks have mapped, sends them a
message, and adds up the packed data of all ranks. All ranks add in rank order, so that they hold
the same bits: see ``memory_exchange.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from tritonddp._modes import outside_modes
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.host.memory_exchange import (
    Announced,
    HostSums,
    MemoryExchange,
    Progress,
    is_in_place,
)
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.connect import Refusal, connect, first_failure
from tritonddp.coordination.host.memory import Memory
from tritonddp.coordination.host.peers import HANDED, Peers, WaitPoint
from tritonddp.coordination.hosts import Hosts
from tritonddp.kernels.flat_buffer import round_up

if TYPE_CHECKING:
    from tritonddp.comm.transport import ProcessGroupTransport

logger = logging.getLogger(__name__)

# Environment variable; 0 disables this transport.
_VARIABLE = "TRITONDDP_PEER_MEMORY"

_AGREEMENT = "agreement on shared memory"

# Alignment of buckets in shared memory, in bytes.
_ALIGNMENT = 4096


class PeerMemory:
    """Moves the buckets of one wrapper into memory that the other ranks of this host can read.

    Lazy and sparse buckets, and those sent as quantized messages, use the process group. With
    several hosts, so do buckets with owners.

    Args:
        transport: reduces the buckets that do not move.
        is_required: raise an error if this is not possible.
    """

    def __init__(
        self, group: Group, transport: ProcessGroupTransport, counters: Counters, is_required: bool
    ) -> None:
        self._group, self._transport, self._counters = group, transport, counters
        self._is_required = is_required
        self.refusal: Refusal | None = None  # set after a failed attempt
        self._progress: Progress | None = None  # set when the ranks are connected
        self._handed = 0  # number of handovers
        self._memory: Memory | None = None  # memory of its buckets
        self._moved: Callable[[], object] = NoneType  # weak: the buckets refer to exchanges

    def begin(self, current: BucketSet) -> None:
        """Announce buckets to the other ranks if a reduction begins before :meth:`move`.

        If another wrapper has connected the ranks, a rank that has diverged may expect a bucket of
        that wrapper. The buckets of a restored run have already moved.
        """
        if self._moved() is current:
            return
        if isinstance(self._group.peers, Peers) and self.refusal is None:
            self._transport.announce(partial(Announced, peers=self._group.peers))
            current.reduce_by(self._transport)

    def end(self) -> None:
        """Handle a mismatch that has ended the last reduction on all ranks; a collective follows.

        No rank then waits for READ, since the numbers of the last sums may differ between ranks.
        """
        if self._progress is not None:
            self._progress.end()

    def leave(self) -> None:
        """Stop announcing buckets: they no longer move, and no rank expects announcements."""
        self._transport.announce(None)

    def connect(self, where: str) -> Hosts | None:
        """Connect the ranks of each host. All ranks call this at the same time.

        Returns:
            The hosts, if there are several with several ranks each.

        Raises:
            RuntimeError: a collective failed.
        """
        if self.refusal is not None:
            return None
        with self._group.guard(where, _AGREEMENT):
            peers = self._connect()
        return peers.hosts if isinstance(peers, Peers) and peers.has_line else None

    def move(self, current: BucketSet, wrapper: int, where: str) -> None:
        """Move these buckets into memory that the other ranks can read, if all ranks can do that.

        All ranks call this at the same time, when they may have new buckets. ``wrapper`` is the
        number of the wrapper in the process group.

        Raises:
            RuntimeError: a move is required but not possible; or a collective failed.
        """
        if self._moved() is current or self.refusal is not None:
            return
        is_first, self._moved = self._moved is NoneType, ref(current)
        guard = self._group.guard(where, _AGREEMENT)
        with guard, outside_modes(current.params):
            peers = self._connect()
            refusal = self._share(current, wrapper, peers) if isinstance(peers, Peers) else peers
        if refusal is None:
            if is_first and self._group.rank == 0 and isinstance(peers, Peers):
                self._tell(current, peers, where)
            return
        self.refusal = refusal
        self._transport.announce(None)
        current.reduce_by(self._transport)
        message = f"{where}: gradients cannot use shared memory of the host: {refusal.why}"
        if self._is_required:
            raise RuntimeError(
                f"{message}. Use transport='auto' to send them through the process group"
            )
        is_warning = refusal.is_failure and self._group.rank == 0
        level = logging.WARNING if is_warning else logging.DEBUG
        logger.log(level, "%s. They are sent through the process group", message)

    def _connect(self) -> Peers | Refusal:
        if self._group.peers is None:
            found = connect(self._group, _refusal())
            if isinstance(found, Refusal):
                self._group.peers = found
            else:
                self._group.peers = Peers(self._group, found, HostSums(self._group))
        connected: Peers | Refusal = self._group.peers
        return connected

    def _tell(self, current: BucketSet, peers: Peers, where: str) -> None:
        """Log once how gradients are exchanged."""
        ranks, has_line = len(peers.others) + 1, peers.has_line
        if any(bucket.wire.is_message for bucket in current.buckets) and not has_line:
            logger.warning(
                "%s: compression slows this run down: it quantizes gradients on the CPU between "
                "the %d ranks of one host. Without compression these ranks exchange gradients "
                "through shared memory",
                where,
                ranks,
            )
        elif HostSums.of(peers).launched == 0:
            logger.info(
                "%s: gradients are exchanged through shared memory of the %d ranks of %s instead "
                "of the process group%s. Set transport='process_group' or %s=0 to change this",
                where,
                ranks,
                "a host" if has_line else "this host",
                ", except between hosts" if has_line else "",
                _VARIABLE,
            )

    def _share(self, current: BucketSet, wrapper: int, peers: Peers) -> Refusal | None:
        found = [
            bucket
            for bucket in current.buckets
            if not (bucket.is_lazy or bucket.storage.is_sparse or bucket.wire.is_message)
            and not (bucket.owned and peers.has_line)
        ]
        starts = [0]
        for bucket in found:
            starts.append(starts[-1] + round_up(bucket.nbytes, _ALIGNMENT))
        memory, failure = Memory(torch.empty(0, dtype=torch.uint8, device="cpu")), ""
        try:
            if found:
                memory = self._memory = Memory.create(starts[-1], is_reserved=False)
                self._group.join_forks(memory)  # gradients may be in it
                for bucket, start in zip(found, starts, strict=False):
                    memory.reserve(start, bucket.nbytes)
                    if is_in_place(bucket, peers):
                        # One storage per bucket, because share_memory() of a gradient moves its
                        # whole storage.
                        part = memory.tensor[start:][: bucket.nbytes]
                        bucket.move(torch.from_dlpack(part))
                    elif bucket.is_large():
                        # Sums go directly into the gradients, so this buffer is not written, and
                        # the system allocates pages only when they are written.
                        bucket.move(torch.empty(bucket.nbytes, dtype=torch.uint8, device="cpu"))
        except OSError as error:
            failure = f"{starts[-1]} bytes cannot be allocated: {error}"
        if failure := first_failure(failure, self._group):
            return Refusal(failure, is_failure=True)
        progress = self._progress = self._progress or Progress(wrapper)
        progress.exchanges.clear()
        # If no bucket uses memory, no rank waits for announcements.
        self._transport.announce(partial(Announced, peers=peers) if found else None)
        current.reduce_by(self._transport)
        if found:
            failure, of_ranks = self._hand_over(memory, wrapper, peers)
            if failure := first_failure(failure, self._group):
                return Refusal(failure, is_failure=True)
            for bucket, start in zip(found, starts, strict=False):
                parts = [each[start:][: bucket.nbytes] for each in of_ranks]
                way = MemoryExchange(progress, self._group, peers, parts, bucket, self._counters)
                bucket.connect(
                    way, None if way.in_place is not None else parts[peers.hosts.local_rank]
                )
        return None

    def _hand_over(self, memory: Memory, wrapper: int, peers: Peers) -> tuple[str, list[Tensor]]:
        """Exchange memory with the other ranks of this host.

        All ranks wait here, because the number of descriptors in flight is limited.

        Returns:
            The failure, or ``""``; and the memory of all ranks of this host.
        """
        failure = ""
        self._handed += 1
        point = WaitPoint(wrapper, peers, self._handed)
        try:
            point.hand_over(HANDED, memory)
        except OSError as error:
            failure = f"the memory cannot be shared: {error}"
            # Send no descriptor, so that the other ranks do not hang.
            peers.say(HANDED, wrapper, 0, point.seq, memory.tensor.numel())
        point.wait_for(HANDED)
        of_ranks: dict[int, Memory | str] = {self._group.rank: memory}
        of_ranks.update((peer.rank, peer.handed.pop(wrapper)) for peer in peers.others)
        tensors = []
        for rank in peers.hosts.ranks[peers.hosts.host]:
            each = of_ranks[rank]
            if isinstance(each, str):
                return failure or each, []
            tensors.append(each.tensor)
        return failure, tensors


def _refusal() -> str:
    """Return why the user has disabled this transport; empty if it is enabled."""
    value = os.environ.get(_VARIABLE, "1")
    return f"{_VARIABLE} is {value}" if value.lower() in ("0", "false", "off", "no") else ""
