"""Where each parameter is: its number, its segment, its bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.assignment import UNLIMITED, BucketCaps, assign_buckets
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.sparse_bucket import SparseBucket
from tritonddp.coordination.agreement import BYTES
from tritonddp.coordination.counters import Counters
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import Marks


@dataclass(frozen=True)
class Place:
    """A segment, its bucket, and the numbers ``[first, last)`` of its parameters."""

    bucket: Bucket
    number: int
    first: int
    last: int


class Placement:
    """Buckets in launch order, and the place of each parameter in them.

    Parameters are numbered in launch order, so that those of a segment are neighbours in every
    list: each is then read in one run, not at a cold address per parameter.

    Args:
        named_params: in the order in which their gradients become ready. What has ``.grad``, a
            shape, a dtype and a device will do.
        caps: bucket sizes.
        bucket_class: how gradients get in and out.
        rank, world_size: this rank, and the number of ranks.
        counters: count what the buckets launch.
        former: its buckets are let go before new ones are made, so that both never exist at
            once; gradients that live in them move.
        sparse: those of the parameters whose gradients are sparse, each in a bucket of its own.
        check_finite: the buckets tell which gradients are not finite, and on which ranks.

    Attributes:
        names, params: by number.
        buckets: in launch order.
        places: of each segment.
        places_of: for each bucket, the numbers of its segments.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        caps: BucketCaps,
        bucket_class: Callable[..., Bucket],
        rank: int,
        world_size: int,
        counters: Counters,
        former: Placement | None = None,
        sparse: Collection[Tensor] = (),
        check_finite: bool = False,
    ) -> None:
        marks = Marks(rank, world_size) if check_finite else None
        assignment = assign(named_params, caps, sparse)
        self.names = [named_params[index][0] for indices in assignment for index in indices]
        self.params = [named_params[index][1] for indices in assignment for index in indices]
        self.buckets: list[Bucket] = []
        self.places: list[Place] = []
        self.places_of: list[range] = []
        placed = former.let_go() if former is not None else {}
        first = 0
        for index, indices in enumerate(assignment):
            last = first + len(indices)
            is_sparse = bool(sparse) and self.params[first] in sparse
            make = partial(SparseBucket, rank, world_size) if is_sparse else bucket_class
            bucket = make(
                index,
                self.params[first:last],
                self.names[first:last],
                select(self.params[first].device, self.params[first].dtype, marks),
                counters,
                ballots=BYTES * world_size if index == 0 else 0,
            )
            bucket.adopt(placed)
            self.buckets.append(bucket)
            before = len(self.places)
            self.places.extend(
                Place(bucket, number, first + begin, first + end)
                for number, (begin, end) in enumerate(bucket.cuts)
            )
            self.places_of.append(range(before, len(self.places)))
            first = last

    def fits(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        caps: BucketCaps,
        sparse: Collection[Tensor] = (),
    ) -> bool:
        """Whether another placement of these parameters would be like this one."""
        assignment = assign(named_params, caps, sparse)
        order = [named_params[index][1] for indices in assignment for index in indices]
        return list(map(id, order)) == list(map(id, self.params)) and list(
            map(len, assignment)
        ) == [len(bucket.params) for bucket in self.buckets]

    def let_go(self) -> dict[Parameter, Tensor]:
        """Drop all buckets; returns the gradients that live in them.

        A bucket lives on, by these gradients, until the last of them has moved.
        """
        placed = {
            param: view
            for bucket in self.buckets
            for param, view in bucket.placed_gradients().items()
        }
        self.buckets.clear()
        self.places.clear()
        return placed


def assign(
    named_params: Sequence[tuple[str, Tensor]], caps: BucketCaps, sparse: Collection[Tensor]
) -> list[list[int]]:
    """The indices of the parameters that share a bucket, in launch order."""
    params = [param for _, param in named_params]
    is_delayed = [name in caps.delayed for name, _ in named_params]
    first = [index for index, delayed in enumerate(is_delayed) if not delayed]
    last = [index for index, delayed in enumerate(is_delayed) if delayed]
    return [
        *assign_buckets(params, first, caps, sparse),
        *assign_buckets(params, last, UNLIMITED, sparse),
    ]
