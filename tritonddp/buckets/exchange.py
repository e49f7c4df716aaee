"""How a bucket gets to the other ranks: what the buckets need to know of it."""

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
    """One bucket's way to the other ranks: it turns local gradients into their sum over all ranks.

    It is chosen when the bucket is made, and used in one reduction after the other. It owns what
    the way needs: memory, messages, numbers.

    Attributes:
        before_pack: waits until the memory that gradients are flattened into is free, or raises a
            :class:`~tritonddp.coordination.host.peers.PeerError`; ``None`` where it always is.
        sum_into: writes the sums of large gradients, times a factor, fp64 ``(1,)``, into these
            tensors, one a slot, and nothing for ``None``; then tells the other ranks that this rank
            has read their memory. ``None`` where :meth:`wait` leaves all sums in the bucket.
    """

    @property
    def before_pack(self) -> Callable[[], None] | None: ...

    @property
    def sum_into(self) -> Callable[[Sequence[Tensor | None], Tensor | None], None] | None: ...

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        """Begin to reduce the bucket, which is packed; returns the work.

        Args:
            bucket: the bucket. (It holds this object, which therefore does not hold it.)
            is_broken: the bucket holds NaN instead of gradients.

        Raises:
            RuntimeError: the collective failed.
        """

    def wait(self, bucket: Bucket, work: Work) -> Tensor | None:
        """Wait until the sum is in the bucket: on a GPU the current stream does, not the host.

        May be called again for the same work: used flags on a GPU, and row counts of sparse
        gradients, are needed before the buckets are unpacked.

        Returns:
            A factor of this bucket's sum alone, fp64 ``(1,)``; ``None`` for 1.

        Raises:
            RuntimeError: the collective failed.
            Mismatch: the ranks do not reduce the same.
        """

    def drain(self, bucket: Bucket, work: Work) -> None:
        """The ranks do not reduce the same: wait until the bucket is not on its way any more.

        All ranks call this. The sum is not needed.
        """


class Transport(Protocol):
    """Makes the exchanges of buckets.

    Attributes:
        averages: gradients are divided by the number of ranks before they are sent.
        ends_in_order: on a GPU the works of buckets that share an exchange end in the order of
            their launch: to wait for the last one is to wait for all.
    """

    averages: bool

    @property
    def ends_in_order(self) -> bool: ...

    def exchanges(self, buckets: Sequence[Bucket]) -> list[BucketExchange]:
        """An exchange for each bucket of a set, in launch order."""


class HostMemory(Protocol):
    """Moves buckets to memory that the ranks of one host share."""

    @property
    def refusal(self) -> Any:
        """Why it does not; ``None`` if it does, or nobody has tried yet."""

    def begin(self, current: BucketSet) -> None:
        """Buckets that have not moved yet are about to be reduced."""

    def end(self) -> None:
        """A mismatch has ended the last reduction on all ranks."""

    def leave(self) -> None:
        """Move no more buckets."""

    def connect(self, where: str) -> Hosts | None:
        """Where several hosts have several ranks each: these. All ranks call this alike."""

    def move(self, current: BucketSet, wrapper: int, where: str) -> None:
        """Move those that have not moved yet, where that is possible: on all ranks alike."""
