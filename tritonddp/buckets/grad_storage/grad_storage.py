"""Where the gradients of a bucket are stored, and how they get into its buffer and out of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tritonddp._device import record_use
from tritonddp.kernels.flat_buffer import Layout

if TYPE_CHECKING:
    from tritonddp.buckets.bucket import Bucket, Segment

# By slot: gradients, and reduced used flags on the host.
Gradients = Sequence[Tensor | None]
Flags = Sequence[float]

_grad_of = attrgetter("grad")
_packed_of, _views_of = attrgetter("storage.grads"), attrgetter("flat.views")


class GradStorage:
    """Gradients stay where autograd made them: they are copied into the buffer, and means back.

    A bucket refers to its storage, which therefore does not refer to the bucket: methods receive
    it.

    Attributes:
        grads: by slot, gradients that are flattened and not yet unflattened.
        wants_flags: a gradient is missing, so the host must read whether another rank has used it.
        has_views: ``.grad`` tensors are views of the buffer.
        is_sparse: the buffer has no gradients, and a second exchange follows.
        views_of: returns the tensors in the buffer of a bucket that ``.grad`` must be, if any.
    """

    views_of: Callable[[Bucket], Sequence[Tensor]] = attrgetter("storage.no_views")
    no_views = ()
    has_views = False
    is_sparse = False

    def __init__(self, slots: int) -> None:
        self.grads: list[Tensor | None] = [None] * slots
        self.wants_flags = False

    def layout(self, bucket: Bucket, headers: int) -> Layout:
        """Return the layout of the buffer, with ``headers`` bytes of headers."""
        return Layout.of(bucket.shapes, bucket.strides, bucket.kernels.alignment, headers)

    # Into the buffer

    def pack(
        self,
        bucket: Bucket,
        segment: Segment,
        used: Sequence[bool],
        scale: float,
        header: bytes,
        earlier: bool,
        count_missing: Callable[..., list[bool]],
    ) -> None:
        """Write ``scale * .grad`` of the segment's parameters, and ``used``, into the buffer.

        Uses one launch. A ``scale`` of zero writes zeros, even for NaN.

        Args:
            bucket: the bucket.
            segment: a segment whose gradients are all final.
            used: for each of its parameters, whether this rank has used it.
            scale: factor of the gradients.
            header: header of this rank, in the first bucket.
            earlier: an unused parameter that has a gradient of an earlier backward contributes
                that gradient, as it would with ``world_size == 1``.
            count_missing: called as ``count_missing(used, params, grads)`` if gradients are
                missing; returns which parameters count as used, with zeros.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        first, last = segment.first, segment.last
        if bucket.flat is None:
            bucket.allocate()
        grads: list[Any] = list(map(_grad_of, segment.params))
        if NoneType in map(type, grads):
            self.wants_flags = True
            used = count_missing(used, segment.params, grads)
        bucket.sent_flags[first:last] = used
        bucket.counters.flattens += 1
        views = self.views_of(bucket)[first:last]
        # Code that sets .data of a gradient (module.to(), for example) has moved the view itself.
        if views:
            addresses = array("q", list(map(Tensor.data_ptr, views)))
            if addresses != bucket.flat.addresses[first:last]:
                bucket.flat.restore_views()
        if False in used:
            for slot, flag in enumerate(used):
                if grads[slot] is not None and not flag:
                    grads[slot] = self._unused(bucket, first + slot, grads[slot])
        for slot in segment.may_be_flagged:
            grad = grads[slot - first]
            if grad is not None and (grad.is_conj() or grad.is_neg()):
                grads[slot - first] = bucket.to_slot_layout(slot, grad)
        flat, kernels = segment.flat, bucket.kernels
        if kernels.takes_pointers and not segment.fits(*grads):
            given, grads = grads, bucket.all_to_slot_layout(segment, grads)
            if NoneType not in map(type, grads) and all(map(is_, given, grads)):
                segment.expect(grads)
        sources = grads if scale else [None] * len(grads)
        if not earlier:
            sources = [grad if flag else None for grad, flag in zip(sources, used, strict=True)]
        header = b"" if flat.is_part else header + bucket.places
        # The kernels of the CPU take any strides, and raise if a gradient does not fit. Then
        # all_to_slot_layout() raises an error that names it. Torch checks the dtype of a new .grad.
        try:
            kernels.flatten(flat, sources, used, scale, header)
            if not views:
                self.grads[first:last] = grads
            elif False in used or not all(map(is_, grads, views)):
                for param, view, flag in zip(segment.params, views, used, strict=True):
                    if flag:
                        param.grad = view  # this frees the gradient
                    else:
                        self.wants_flags = True
        except RuntimeError:
            bucket.all_to_slot_layout(segment, grads)
            raise

    def _unused(self, bucket: Bucket, slot: int, grad: Tensor) -> Tensor:
        """Return a gradient that this backward did not make, as a tensor that can be written to.

        The user may have set any tensor, for example an expanded one.
        """
        return bucket.to_slot_layout(slot, grad)

    def fetch(self, bucket: Bucket, segment: Segment) -> None:
        """Take the current ``.grad`` of a packed segment, if any; means will overwrite it."""
        grads: list[Any] = list(map(_grad_of, segment.params))
        if bucket.kernels.takes_pointers:
            grads = bucket.all_to_slot_layout(segment, grads)
        self.grads[segment.first : segment.last] = grads

    def fill_nan(self, bucket: Bucket, header: bytes = b"") -> None:
        """Fill the buffer with NaN instead of gradients."""
        if bucket.flat is None:
            bucket.allocate()
        self._fill_nan(bucket, [False] * len(bucket.params), header)

    def overwrite_nan(self, bucket: Bucket) -> None:
        """Replace the packed gradients by NaN. Not for the first bucket, which has a header."""
        # At least one flag must be set, or every rank ignores the NaNs.
        used = bucket.sent_flags
        self._fill_nan(bucket, used if any(used) else [True] * len(used), b"")

    def _fill_nan(self, bucket: Bucket, used: Sequence[bool], header: bytes) -> None:
        bucket.packed.fill_nan()
        bucket.packed.write_trailer(used, header + bucket.places)
        if bucket.checked is not None:
            bucket.note_not_finite()

    # Out of the buffer

    def unpack(self, bucket: Bucket, factor: Tensor | None, flags: Flags | None) -> None:
        """Write the reduced gradients, times ``factor``, into ``.grad``.

        ``factor`` is one fp64 element on the bucket's device. If no rank used a parameter, its
        ``.grad`` does not change.

        Uses one launch. If another rank used a parameter that has no ``.grad`` here, ``.grad`` is
        created. Only then must the host read the flags, unless it has read them for several buckets
        together.
        """
        flat, kernels, grads = bucket.flat, bucket.kernels, self.grads
        if bucket.others and not kernels.takes_pointers:
            self._drop_others(bucket)
        has_missing = self.wants_flags
        made: dict[int, Tensor] = {}
        sum_into = bucket.exchange.sum_into
        casts = flat.dtype is not bucket.gradient_dtype
        if factor is not None and not (kernels.takes_pointers or casts or sum_into is not None):
            if factor.item() != 1:  # one call costs less than one for each gradient
                flat.payload.mul_(factor.item())
            factor = None
        if has_missing:
            for slot, flag in enumerate(flat.flags.tolist() if flags is None else flags):
                if flag and grads[slot] is None and slot not in bucket.others:
                    grads[slot] = made[slot] = bucket.empty_gradient(slot)
        if sum_into is not None:
            bucket.counters.unflattens += 1
            sum_into(grads, factor)
        elif not has_missing or set(map(type, grads)) != {NoneType}:
            bucket.counters.unflattens += 1
            kernels.unflatten(flat, grads, factor)
        for slot, grad in made.items():
            bucket.params[slot].grad = grad
        # Otherwise these references would outlive zero_grad().
        self.grads, self.wants_flags = [None] * len(grads), False
        if bucket.others:
            self._drop_others(bucket)

    def _drop_others(self, bucket: Bucket) -> None:
        """Drop the gradients that other ranks own.

        On a GPU they are unflattened first: a table without them would have to be uploaded.
        """
        for slot in bucket.others:
            bucket.params[slot].grad = self.grads[slot] = None

    def discard(self, bucket: Bucket) -> None:
        """Drop the references to gradients, and leave ``.grad`` unchanged."""
        self.grads, self.wants_flags = [None] * len(self.grads), False
        if bucket.exchange.sum_into is not None:
            bucket.exchange.sum_into(self.grads, None)


class JointUnpack:
    """Buckets of a set that are unpacked together when the last of them is reduced.

    Used on a GPU, where one launch per bucket would cost the host more time than the device saves.
    There is one launch for the buckets of each dtype. See :meth:`fits`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        groups: dict[Any, list[Bucket]] = {}
        for bucket in buckets:
            groups.setdefault((bucket.gradient_dtype, bucket.wire.flat_dtype), []).append(bucket)
        self._groups: list[tuple[list[Bucket], list[int], Any]] = []
        for group in groups.values():
            make: Any = group[0].kernels.joint_unflatten
            sizes = [len(each.params) for each in group]
            self._groups.append((group, sizes, make([bucket.flat for bucket in group])))

    @staticmethod
    def fits(buckets: Sequence[Bucket]) -> bool:
        """Return True if none of these buckets must be unpacked separately."""
        return not any(
            each.is_lazy or each.owned or each.kernels.joint_unflatten is None for each in buckets
        )

    def unpack(self, factor: Tensor | None) -> None:
        """Write the reduced gradients, times ``factor``: see :meth:`GradStorage.unpack`.

        No bucket may need flags.
        """
        for buckets, sizes, unflatten in self._groups:
            has_views = buckets[0].storage.has_views
            if factor is not None or not has_views:
                buckets[0].counters.unflattens += 1
                unflatten(list(map(_views_of if has_views else _packed_of, buckets)), factor)
            for bucket, size in zip(buckets, sizes, strict=True):
                storage = bucket.storage
                storage.grads = [None] * size

    def retire(self) -> None:
        """Prepare to be dropped, perhaps while a GPU still unflattens."""
        record_use(*(each for _, _, unflatten in self._groups for each in unflatten.memory))
