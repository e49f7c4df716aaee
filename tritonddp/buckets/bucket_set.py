"""Buckets in launch order, and the position of each parameter in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Parameter
from torch.profiler import record_function

from tritonddp._torch import is_profiling
from tritonddp.buckets.assignment import NO_OWNERS, UNLIMITED, BucketCaps, assign_buckets
from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.buckets.exchange import Transport
from tritonddp.buckets.formats import BucketFactory
from tritonddp.buckets.grad_storage.grad_storage import JointUnpack
from tritonddp.buckets.parameter_use import ParameterUse


class BucketSet:
    """Buckets in launch order, and the position of each parameter in them.

    Parameters are numbered in launch order, so that the parameters of a segment are adjacent in
    every list: they are read in one run, not at one cold address per parameter.

    Args:
        named_params: parameters in the order in which their gradients become ready. Any tensor
            that can have ``.grad`` is accepted.
        former: its buckets are dropped before new ones are made, so that they never coexist;
            gradients that are views of them move.
        sparse: parameters with sparse gradients; each gets a separate bucket.
        is_temporary: the buckets are for one reduction; work that pays off only later is omitted.

    Attributes:
        names, params: by parameter index.
        use: which of the parameters are used.
        buckets: in launch order.
        segments: the segments of all buckets, each with its bucket.
        ranges: for each segment, the indices of its parameters.
        segments_of, numbers_of: for each bucket, the indices of its segments and of its parameters.
        to_release: buckets whose ``release`` has to be called before and after each backward.
        averages: see :class:`Transport`.
        is_on_gpu: some parameters are on a GPU.
        needs_reduction: a bucket changes gradients even if ``world_size == 1``.
        unpack_groups: groups of buckets that are unpacked together, each as the last bucket of
            the group and its unpacker. Empty if each bucket is unpacked separately.
        spans: spans of a running or previous profiler; see :meth:`renew_spans`.
    """

    unpack_groups: Sequence[tuple[Bucket, JointUnpack]] = ()
    spans: _Spans | None = None

    def __init__(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        caps: BucketCaps,
        factory: BucketFactory,
        former: BucketSet | None = None,
        sparse: Collection[Tensor] = (),
        is_temporary: bool = False,
    ) -> None:
        assignment = _assign(named_params, caps, sparse, factory.owners)
        self.names = [named_params[index][0] for indices in assignment for index in indices]
        self.params = [named_params[index][1] for indices in assignment for index in indices]
        self.use = ParameterUse(self.params)
        self.is_on_gpu = any(param.is_cuda for param in self.params)
        self._is_temporary = is_temporary
        self.buckets: list[Bucket] = []
        self.segments: list[tuple[Bucket, Segment]] = []
        self.ranges: list[range] = []
        self.segments_of: list[range] = []
        self.numbers_of: list[range] = []
        in_buffer = former.retire() if former is not None else {}
        first = 0
        for index, indices in enumerate(assignment):
            numbers = range(first, first + len(indices))
            params, names = self.params[first : numbers.stop], self.names[first : numbers.stop]
            is_sparse = bool(sparse) and params[0] in sparse
            bucket = factory.make(index, params, names, is_sparse)
            bucket.adopt(in_buffer)
            self.buckets.append(bucket)
            before = len(self.segments)
            for segment in bucket.segments:
                self.segments.append((bucket, segment))
                self.ranges.append(range(first + segment.first, first + segment.last))
            self.segments_of.append(range(before, len(self.segments)))
            self.numbers_of.append(numbers)
            first = numbers.stop
        self.reduce_by(factory.transport)
        if self.is_on_gpu and not is_temporary and factory.group.size > 1:
            for bucket in self.buckets:
                bucket.compile_kernels(bool(self.unpack_groups))
        self.needs_reduction = any(bucket.storage.is_sparse for bucket in self.buckets)
        self.to_release = [bucket for bucket in self.buckets if bucket.is_lazy]

    def reduce_by(self, transport: Transport) -> None:
        """Reduce all buckets with ``transport`` from now on."""
        self.averages = transport.averages
        exchanges = transport.exchanges(self.buckets)
        for bucket, exchange in zip(self.buckets, exchanges, strict=True):
            bucket.connect(exchange)
        self._retire_groups()
        if self.is_on_gpu and transport.ends_in_order and not self._is_temporary:
            devices = {param.device for param in self.params}  # NCCL has one stream per device
            if len(devices) == len(set(map(id, exchanges))) == 1 and JointUnpack.fits(self.buckets):
                # Unpack the last bucket separately, so that the others are unpacked while it is in
                # flight. In a model of the overlap, more groups hide no more communication, and
                # each costs the host a launch.
                parts = filter(None, (self.buckets[:-1], self.buckets[-1:]))
                self.unpack_groups = [(part[-1], JointUnpack(part)) for part in parts]

    def _retire_groups(self) -> None:
        for _, unpack in self.unpack_groups:
            unpack.retire()
        self.unpack_groups = ()

    def restore_views(self) -> None:
        """Point gradients that were moved, as by ``module.to()``, back to the memory of buckets."""
        for bucket in self.buckets:
            if bucket.storage.has_views and bucket.flat is not None:
                bucket.flat.restore_views()

    def fits(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        caps: BucketCaps,
        sparse: Collection[Tensor] = (),
        owners: Mapping[Tensor, int] = NO_OWNERS,
    ) -> bool:
        """Return True if buckets for these parameters would be the same as the current ones."""
        assignment = _assign(named_params, caps, sparse, owners)
        order = [named_params[index][1] for indices in assignment for index in indices]
        cuts = [(len(each), named_params[each[0]][1] in owners) for each in assignment]
        return list(map(id, order)) == list(map(id, self.params)) and cuts == [
            (len(bucket.params), bucket.owned is not None) for bucket in self.buckets
        ]

    def renew_spans(self) -> None:
        """Show the work on each bucket in ``torch.profiler``, if one runs, in this reduction.

        The spans are pack, launch, wait and unpack. They are renewed, since exchanges may be new.
        """
        if self.spans is not None:
            self.spans.remove()
        self.spans = _Spans(self) if is_profiling() else None

    def retire(self) -> dict[Parameter, Tensor]:
        """Drop all buckets, and return the gradients that are views of them.

        These gradients keep the memory of a bucket alive until the last of them has moved.
        """
        in_buffer = {
            param: view for bucket in self.buckets for param, view in bucket.in_buffer().items()
        }
        for bucket in self.buckets:
            bucket.retire()
        self._retire_groups()
        if self.spans is not None:  # it holds them
            self.spans.remove()
            self.spans = None
        for each in (self.buckets, self.segments, self.to_release):
            each.clear()
        return in_buffer


def _assign(
    named_params: Sequence[tuple[str, Tensor]],
    caps: BucketCaps,
    sparse: Collection[Tensor],
    owners: Mapping[Tensor, int] = NO_OWNERS,
) -> list[list[int]]:
    """Return the indices of the parameters that share a bucket, in launch order.

    In a bucket, parameters of one owner are adjacent.
    """
    params = [param for _, param in named_params]
    is_delayed = [name in caps.delayed for name, _ in named_params]
    first = [index for index, delayed in enumerate(is_delayed) if not delayed]
    last = [index for index, delayed in enumerate(is_delayed) if delayed]
    assignment = [
        *assign_buckets(params, first, caps, sparse, owners),
        *assign_buckets(params, last, UNLIMITED, sparse, owners),
    ]
    if owners:
        for indices in assignment:
            indices.sort(key=lambda index: owners.get(params[index], 0))
    return assignment


class _Spans:
    """Profiler spans around methods of the buckets of a set and of their exchanges.

    The methods are replaced by attributes of the objects, so that nothing is called without a
    profiler.
    """

    def __init__(self, bucket_set: BucketSet) -> None:
        self._owners: list[tuple[Any, str]] = []
        for bucket in bucket_set.buckets:
            for method in ("pack", "unpack"):
                self._wrap(bucket.storage, method)
            for method in ("launch", "wait"):
                self._wrap(bucket.exchange, method)
        first = 0
        for last, group in bucket_set.unpack_groups:
            several = f"buckets {first} to {last.index}"
            self._wrap(group, "unpack", several if first < last.index else f"bucket {first}")
            first = last.index + 1

    def _wrap(self, owner: Any, method: str, title: str = "") -> None:
        function: Callable[..., Any] = getattr(type(owner), method)
        reference = ref(owner)  # an object that refers to itself would be freed late

        def spanned(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"tritonddp: {method} {title or f'bucket {args[0].index}'}"):
                return function(reference(), *args, **kwargs)

        setattr(owner, method, spanned)
        self._owners.append((owner, method))

    def remove(self) -> None:
        """Restore the methods of the classes."""
        for owner, method in self._owners:
            vars(owner).pop(method, None)  # several buckets may have one exchange
