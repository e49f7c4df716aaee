"""The sum over ranks of one host, in memory that they share.

gloo moves each byte through the kernel several times, even between two processes of one host. Here
each rank packs its buckets into memory that the others have mapped, tells them by a message, and
adds up what all have packed, in the order of the ranks, so that all hold the same bits. The sum
goes into memory of its own: until all have packed a bucket, nothing has become of ``.grad``.

With few ranks, or little data, each rank adds up whole buckets (*one shot*). Otherwise each does so
with its share, in place, and copies those of the others (*two shots*): it reads 2 buckets instead
of ``world_size``, and waits twice.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.coordination.peers import (
    PACKED,
    READ,
    SUMMED,
    Memory,
    Peers,
    Refusal,
    connect,
    first_failure,
)

logger = logging.getLogger("tritonddp.comm.peer_memory")

# Refuses it, if it is 0.
_VARIABLE = "TRITONDDP_PEER_MEMORY"

# Bytes that are added up at once where there are more than two ranks: they stay in the cache
# between two additions.
_PIECE = 512 * 1024
# From so many ranks and bytes on each adds up its share only.
_RANKS_OF_SHARES, _BYTES_OF_SHARES = 4, 256 * 1024


def _nothing() -> None:
    """What a weak reference to something that is gone returns."""


class PeerMemory:
    """Exchanges of buckets with the other ranks, if all of them are on this host.

    Of one wrapped module. Exchanges are numbered alike on all ranks, which launch them in the same
    order.

    Args:
        group: all ranks.
        is_required: where it cannot be had, that is an error.

    Attributes:
        number: of the module.
        last: number of its last exchange.
        mapped: memory of other ranks, by rank and bucket.
        without_share: exchanges whose share this rank has still to add up, in their order.
    """

    def __init__(self, group: Group, is_required: bool) -> None:
        self.rank, self.size = group.rank, group.size
        self.peers: Peers | None = None
        self.number = self.last = 0
        self.mapped: dict[tuple[int, int], Memory] = {}
        self.without_share: list[TwoShots] = []
        self._group = group
        self._is_required = is_required
        self._is_refused = False
        self._followed: Callable[[], object] = _nothing  # weakly: its buckets refer to this

    def follow(self, current: BucketSet, where: str) -> None:
        """Have these buckets packed where the other ranks can read them, if all ranks can do that.

        All ranks call this, at the same time, when they have new buckets, and perhaps more often.

        Raises:
            RuntimeError: it cannot be had, and is required; or a collective failed.
        """
        if self._is_refused or self._followed() is current:
            return
        self._followed = weakref.ref(current)
        with self._group.guard(where, "agreement to exchange through memory"):
            refusal = self._connect(where) or self._share(current.buckets)
        if refusal is None:
            return
        self._is_refused = True
        told = f"{where}: gradients cannot go through memory of the host: {refusal.why}"
        if self._is_required:
            raise RuntimeError(f"{told}. With transport='auto' they go through the process group")
        level = logging.WARNING if refusal.is_failure and self.rank == 0 else logging.DEBUG
        logger.log(level, "%s. They go through the process group", told)

    def _connect(self, where: str) -> Refusal | None:
        if self.peers is not None:
            return None
        if self._group.peers is None:
            self._group.peers = connect(self._group, _refusal())
            if self.rank == 0 and isinstance(self._group.peers, Peers):
                logger.info(
                    "%s: gradients go through memory that the %d ranks of this host share, not "
                    "through the process group; transport='process_group' or %s=0 changes that",
                    *(where, self.size, _VARIABLE),
                )
        if isinstance(self._group.peers, Refusal):
            return self._group.peers
        self.peers = self._group.peers
        self.number = self.peers.enter(self)
        return None

    def _share(self, buckets: Sequence[Bucket]) -> Refusal | None:
        found = [
            bucket
            for bucket in buckets
            if not (bucket.is_lazy or bucket.is_sparse or bucket.quantization is not None)
        ]
        memory, failure = [], ""
        try:
            memory = [Memory.create(bucket.nbytes) for bucket in found]
        except OSError as error:
            failure = f"{sum(b.nbytes for b in found)} bytes cannot be allocated: {error}"
        if failure := first_failure(failure, self._group):
            return Refusal(failure, is_failure=True)
        for bucket, each in zip(found, memory, strict=True):
            exchange = self.exchange(each, bucket.index, bucket.flat.data.dtype)
            bucket.share(exchange, each.tensor)
        return None

    def exchange(self, memory: Memory, index: int, dtype: torch.dtype) -> Exchange:
        """The exchanges of bucket ``index``, which is packed in ``memory``."""
        assert self.peers is not None
        has_shares = self.size >= _RANKS_OF_SHARES and memory.tensor.numel() >= _BYTES_OF_SHARES
        kind = TwoShots if has_shares else Exchange
        return kind(self, self.peers, memory, index, dtype)


def _refusal() -> str:
    """Why the user does not want it; empty if nothing is said."""
    value = os.environ.get(_VARIABLE, "1")
    return f"{_VARIABLE} is {value}" if value.lower() in ("0", "false", "off", "no") else ""


class Exchange:
    """The exchanges of one bucket, one after the other; a work object. In one shot.

    Attributes:
        number: of the last one.
        is_free: nobody reads any more what was packed for it.
        packed: by all ranks, in their order; empty before the first exchange.
    """

    def __init__(
        self, every: PeerMemory, peers: Peers, memory: Memory, index: int, dtype: torch.dtype
    ) -> None:
        self.number = 0
        self.is_free = True
        self.packed: list[Tensor] = []
        self._all = every
        self._peers = peers
        self._memory = memory
        self._index, self._nbytes, self._dtype = index, memory.tensor.numel(), dtype
        self._result: Tensor | None = None  # where the sum goes, while it is waited for
        self._future: torch.futures.Future[None] | None = None

    def reserve(self) -> None:
        """Wait until nobody reads any more what was packed for the last exchange.

        Raises:
            PeerError: see :meth:`Peers.wait`.
        """
        self._peers.wait(READ, self._all.number, self.number)
        self.is_free = True

    def launch(self, result: Tensor) -> None:
        """The bucket is packed: tell the others. The sum will be in ``result``."""
        every, peers, memory = self._all, self._peers, self._memory
        peers.launched += 1
        self.number = every.last = peers.launched
        self.is_free, self._result = False, result
        what = every.number, self.number, self._index, self._nbytes
        peers.send(PACKED, *what, memory.descriptor)
        memory.close_descriptor()

    def wait(self) -> None:
        """Until the sum is there.

        Raises:
            PeerError: a rank is gone or late, or packs something else.
        """
        if self._result is None:  # it was waited for
            return
        self._sum(self._result)
        with Uninterrupted():  # or the others would wait for ever, or what was read come anew
            self._result = None
            self._peers.forget(self.number)
            if self.number == self._all.last:
                self._peers.send(READ, self._all.number, self.number)
        if self._future is not None:
            future, self._future = self._future, None
            future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        """Complete when the sum is there: for traces."""
        self._future = torch.futures.Future()
        return self._future

    def take(self) -> None:
        """Wait until all have packed the bucket."""
        every, index = self._all, self._index
        self._peers.wait_packed(every.number, self.number, index, self._nbytes)
        if not self.packed:
            came = [
                self._memory if rank == every.rank else every.mapped[rank, index]
                for rank in range(every.size)
            ]
            self.packed = [each.tensor.view(self._dtype) for each in came]

    def _sum(self, result: Tensor) -> None:
        self.take()
        _add(self.packed, result)


class TwoShots(Exchange):
    """Each rank adds up its share of the bucket, and all copy that."""

    def launch(self, result: Tensor) -> None:
        """See :meth:`Exchange.launch`."""
        super().launch(result)
        self._all.without_share.append(self)

    def _sum(self, result: Tensor) -> None:
        waiting = self._all.without_share
        # Also of later ones, if they have come: other ranks wait for that.
        while waiting and (
            waiting[0].number <= self.number or self._peers.have_packed(waiting[0].number)
        ):
            waiting[0].take()
            with Uninterrupted():  # in place: not to be done twice
                waiting[0].sum_share()
                del waiting[0]
        self._peers.wait(SUMMED, self._all.number, self.number)
        for rank, share in enumerate(self._shares(result)):
            share.copy_(self._shares(self.packed[rank])[rank])

    def sum_share(self) -> None:
        """Add up the share of this rank, and tell the others."""
        rank = self._all.rank
        mine = [self._shares(each)[rank] for each in self.packed]
        _add(mine, mine[rank])
        self._peers.send(SUMMED, self._all.number, self.number)

    def _shares(self, whole: Tensor) -> Sequence[Tensor]:
        """One for each rank."""
        return whole.tensor_split(self._all.size)


def _add(parts: Sequence[Tensor], result: Tensor) -> None:
    """Write the sum of ``parts``, from the first to the last, into ``result``, or one of them."""
    first, second, *others = parts
    if not others:
        torch.add(first, second, out=result)
        return
    size = _PIECE // result.element_size()
    *cuts, targets = (each.split(size) for each in (*parts, result))
    for first, second, *others, last, target in zip(*cuts, targets, strict=True):
        total = torch.add(first, second)
        for other in others:
            total.add_(other)
        torch.add(total, last, out=target)
