"""Protocols of the exchanges that buckets use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from tritonddp.coordination.collectives import Work
from tritonddp.coordination.hosts import Hosts

if TYPE_CHECKING:
    from tritonddp.buckets.bucket import Bucket
    from tritonddp.buckets.bucket_set import BucketSet


class BucketExchange(Protocol):
    """Turns the local gradients of one bucket into their sum over all ranks.

    An exchange is chosen when the bucket is made, and used in all its reductions. It owns what the
    exchange needs: memory, messages, numbers.

    Attributes:
        before_pack: waits until the memory that gradients are flattened into is free, or raises
            a :class:`~tritonddp.coordination.host.peers.PeerError`; ``None`` if it is always free.
        sum_into: writes the sums of large gradients, times a factor, fp64 ``(1,)``, into the
            given tensors, one per slot, and nothing for ``None``. Then it tells the other ranks
            that this rank has read their memory. ``None`` if :meth:`wait` leaves all sums in the
            bucket.
    """

    @property
    def before_pack(self) -> Callable[[], None] | None: ...

    @property
    def sum_into(self) -> Callable[[Sequence[Tensor | None], Tensor | None], None] | None: ...

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        """Start to reduce the packed bucket, and return the work.

        Args:
            bucket: the bucket. It refers to this object, which therefore does not refer to it.
            is_broken: the bucket holds NaN instead of gradients.

        Raises:
            RuntimeError: the collective failed.
        """

    def wait(self, bucket: Bucket, work: Work) -> Tensor | None:
        """Wait until the sum is in the bucket. On a GPU the current stream waits, not the host.

        May be called again for the same work: used flags on a GPU, and row counts of sparse
        gradients, are needed before the buckets are unpacked.

        Returns:
            A factor that applies to this bucket's sum only, fp64 ``(1,)``; ``None`` for 1.

        Raises:
            RuntimeError: the collective failed.
            Mismatch: the ranks reduced different gradients.
        """

    def drain(self, bucket: Bucket, work: Work) -> None:
        """Wait until the bucket is no longer in flight, after a mismatch between ranks.

        All ranks call this. The sum is not needed.
        """


class Transport(Protocol):
    """Creates the exchanges of buckets.

    Attributes:
        averages: gradients are divided by the number of ranks before they are sent.
        ends_in_order: on a GPU the works of buckets that share an exchange end in launch order:
            waiting for the last one waits for all.
    """

    averages: bool

    @property
    def ends_in_order(self) -> bool: ...

    def exchanges(self, buckets: Sequence[Bucket]) -> list[BucketExchange]:
        """Return an exchange for each bucket of a set, in launch order."""


class HostMemory(Protocol):
    """Finds hosts with several ranks, and moves buckets into memory that such ranks share.

    On GPUs, buckets do not move.
    """

    @property
    def refusal(self) -> Any:
        """Reason why buckets do not move; ``None`` if they do, or if no attempt was made yet."""

    def begin(self, current: BucketSet) -> None:
        """Prepare for a reduction of buckets that have not moved yet."""

    def end(self) -> None:
        """Handle a mismatch, which has ended the last reduction on all ranks."""

    def leave(self) -> None:
        """Stop moving buckets."""

    def connect(self, where: str) -> Hosts | None:
        """Return the hosts if several hosts have several ranks each. All ranks call this."""

    def move(self, current: BucketSet, wrapper: int, where: str) -> None:
        """Move the buckets that have not moved yet, where possible; the same ones on all ranks."""
