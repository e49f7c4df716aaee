"""A bucket: gradients that are reduced together, and how they get in and out.

A bucket owns one :class:`FlatBuffer`. How its gradients get in and out is the only difference
between the classes of buckets: :class:`Bucket` copies them in and out,
:class:`~tritonddp.buckets.memory.view_bucket.ViewBucket` leaves them in the buffer, and
:class:`~tritonddp.buckets.memory.in_place_bucket.InPlaceBucket` large ones where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, is_
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import record_use
from tritonddp._torch import like
from tritonddp.buckets.exchange import BucketExchange
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.kernels.dispatch import Kernels, gradient_dtype
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.memory_order import dims_by_stride, gradient_strides
from tritonddp.kernels.quantized.buffer import Quantization

if TYPE_CHECKING:
    from tritonddp.kernels.device_tables import DeviceTables

_grad_of = attrgetter("grad")
_packed_of, _views_of = attrgetter("_grads"), attrgetter("flat.views")


def _are_unknown(*_: Any) -> bool:
    """The :attr:`Segment.fits` before the first gradients."""
    return False


class GradientError(RuntimeError):
    """A gradient cannot be put into its bucket."""


class Owned(NamedTuple):
    """Which rank the gradient of each slot of a bucket is reduced to.

    Attributes:
        slots: of each rank, one range after the other; some may be empty.
        mine: those of this rank.
    """

    slots: tuple[range, ...]
    mine: range

    def elements(self, flat: FlatBuffer) -> list[tuple[int, int]]:
        """Of each rank: first element in ``flat.data``, and end."""
        width = flat.dtype.itemsize // flat.data.element_size()  # (a complex one is two real ones)
        starts = [*(width * offset for offset in flat.layout.offsets), len(flat.payload)]
        return [(starts[slots.start], starts[slots.stop]) for slots in self.slots]


class Segment:
    """Some slots of a bucket, which one launch flattens. A slot is the place of one parameter.

    On a GPU a segment is the whole bucket. On the CPU it is small enough that its gradients are
    still in the cache when they are flattened.

    Attributes:
        first, last: its slots are ``[first, last)``.
        is_whole: they are all slots of the bucket.
        params: the parameters in these slots.
        may_be_flagged: slots whose gradient may have the conjugate or negative bit.
        flat: the part of the bucket's buffer, ``None`` while that has no memory.
        fits: whether gradients have dtype, device, shapes and strides of earlier ones, which had
            the memory order of the slots.
    """

    __slots__ = ("first", "fits", "flat", "is_whole", "last", "may_be_flagged", "params")

    def __init__(self, first: int, last: int, params: Sequence[Parameter]) -> None:
        self.first = first
        self.last = last
        self.is_whole = last - first == len(params)
        self.params = list(params[first:last])
        # A complex gradient may have the conjugate bit. A real one that is a part of a conjugate
        # may have the negative bit. (If it has more than one element, autograd copies it.)
        self.may_be_flagged = [
            slot
            for slot, param in enumerate(self.params, first)
            if param.is_complex() or param.numel() == 1
        ]
        self.flat: Any = None
        self.fits: Callable[..., bool] = _are_unknown


class Bucket:
    """Parameters whose gradients are reduced together, copied into the flat buffer and out of it.

    Args:
        index, params, names, quantization, owned: see below.
        kernels: for the gradients' device and dtype.
        counters: count launches.
        headers: bytes of the headers of all ranks, which are sent in this bucket.
        wire_dtype: dtype in which gradients are sent; by default their own.
        lazy: the buffer has memory only from the first gradient of a backward to its end.
            Gradients that are views of it keep it alive until they are dropped.
        checked: this rank and the number of ranks, if all ranks shall know whose gradients are not
            finite, see :meth:`note_not_finite`.

    Attributes:
        index: place in the launch order, the same on every rank.
        params: the parameters, in launch order.
        names: their names, for errors.
        gradient_dtype: of ``.grad``, the same for all of them.
        flat: the buffer that the collective sends, ``None`` while a lazy bucket has no memory.
        packed: the buffer that gradients are flattened into: ``flat``, or shared memory that other
            ranks read.
        exchange: its way to the other ranks.
        segments: the parts of the bucket that are flattened at once.
        nbytes: bytes sent: payload and trailer (used flags and headers).
        used: for each packed slot, whether this rank has a gradient for it.
        quantization: how its gradients are quantised; ``None`` if they are not.
        has_views: ``.grad`` tensors are views of the buffer.
        is_sparse: a second exchange follows that of the buffer.
        owned: each gradient is reduced to one rank: on the others ``.grad`` becomes ``None``. Or
            ``None``: to all ranks.
        is_lazy: see above.
        unbuffered: once the bucket is packed, tensors that are reduced with the buffer: large
            gradients where they lie. ``None`` in other buckets than an ``InPlaceBucket``.
        has_to_prepare: :meth:`prepare` has to be called before each backward.
        wants_flags: a gradient is missing: the host has to read whether another rank has used it.
    """

    exchange: BucketExchange
    wants_flags = False
    is_sparse = False
    has_views = False
    unbuffered: Sequence[Tensor] | None = None

    def __init__(
        self,
        index: int,
        params: Sequence[Parameter],
        names: Sequence[str],
        kernels: Kernels,
        counters: Counters,
        headers: int = 0,
        wire_dtype: torch.dtype | None = None,
        lazy: bool = False,
        quantization: Quantization | None = None,
        owned: Owned | None = None,
        checked: tuple[int, int] | None = None,
    ) -> None:
        self.index = index
        self.owned = owned
        self.params = list(params)
        self.names = list(names)
        self.quantization = quantization
        self._kernels = kernels
        self._counters = counters
        self.gradient_dtype = gradient_dtype(params[0])
        self._wire_dtype = wire_dtype or self.gradient_dtype
        self.is_lazy = lazy
        self.used = [False] * len(params)
        # Gradients that are flattened, and not yet unflattened.
        self._grads: list[Tensor | None] = [None] * len(params)
        self.checked, self._headers = checked, headers
        self._layout = self._make_layout(len(self._with_places(bytes(headers))))
        self.segments = [Segment(*cut, self.params) for cut in kernels.segments(self._layout)]
        self.flat: Any = None
        # Of a buffer that was released: its reduced used flags, and its tables.
        self._released: tuple[Tensor | None, DeviceTables | None] = None, None
        self.allocate()
        flat: Any = self.flat
        self.nbytes: int = flat.nbytes
        self.release()

    @property
    def has_to_prepare(self) -> bool:
        """See the class."""
        return self.is_lazy

    def is_large(self) -> bool:
        """Whether its gradients are so large, on the CPU, that each is worth a call.

        They are sent in their own dtype and are no views: an exchange may sum them in ``.grad``.
        """
        casts = self._wire_dtype is not self.gradient_dtype
        return self._kernels.are_large(self._layout) and not casts and not self.has_views

    def _make_layout(self, headers: int) -> Layout:
        return Layout.of(
            [param.shape for param in self.params],
            [gradient_strides(param) for param in self.params],
            self._kernels.alignment,
            headers,
        )

    def allocate(self) -> None:
        """Make a buffer."""
        flat = self._buffer(self.params[0].device)
        _, tables = self._released
        if tables is None:
            self._kernels.tables(flat)
        else:
            flat.tables = tables
        self.flat = flat
        self._pack_into(flat)

    def _buffer(self, device: torch.device, memory: Tensor | None = None) -> Any:
        given = () if memory is None else (memory,)
        flat = self._kernels.buffer(self._layout, self._wire_dtype, device, *given)
        flat.headers = flat.headers[: self._headers]  # else with places of ranks behind them
        return flat

    def compile_kernels(self, is_joint: bool) -> None:
        """Compile all kernels that a step may need, so that none makes other ranks wait for it.

        Args:
            is_joint: the bucket is unpacked together with others.
        """
        is_released = self.flat is None
        if is_released:
            self.allocate()
        self._kernels.compile(self.flat, self.gradient_dtype, self.has_views, is_joint)
        if is_released:
            self.release()

    def _pack_into(self, flat: Any) -> None:
        self.packed = flat
        for segment in self.segments:
            segment.flat = flat if segment.is_whole else flat.part(segment.first, segment.last)

    def connect(self, exchange: BucketExchange) -> None:
        """Go to the other ranks by ``exchange``, from the flat buffer."""
        if self.packed is not self.flat:
            self._pack_into(self.flat)
        self.exchange = exchange

    def share(self, exchange: BucketExchange, memory: Tensor) -> None:
        """Go to the other ranks by ``exchange``, from ``memory`` that they read.

        For a bucket on the CPU that is not lazy, sparse or quantised.

        Args:
            exchange: sums what all ranks have packed.
            memory: this rank's part of what they have packed, uint8 zeros ``(nbytes,)``.
        """
        self.exchange = exchange
        self._pack_into(self._buffer(memory.device, memory))

    def leave_payload(self) -> None:
        """No gradient will be written to the buffer: the system need not give it that memory.

        (It gives memory to a page when that is written first. The buffer keeps its trailer.)
        """
        first, data = self._layout.flags_offset, self.flat.data
        memory = torch.empty(data.nbytes, dtype=torch.uint8, device="cpu")
        self.flat = self._buffer(data.device, memory)
        self.flat.data[first:] = data[first:]

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype in which most of the gradients are sent."""
        return self._wire_dtype if self.quantization is None else torch.int8

    @property
    def title(self) -> str:
        """Number and parameters, for errors."""
        return f"bucket {self.index} ({listed(self.names)})"

    def rank_counts(self) -> Tensor:
        """After a reduction: for each parameter, the number of ranks that used it."""
        if self.flat is not None:
            return self.flat.flags
        counts, _ = self._released
        return torch.zeros(len(self.params), device="cpu") if counts is None else counts

    # Before a backward

    def prepare(self) -> None:
        """A lazy bucket gives its memory back, if the last backward has left it some."""
        self.release()

    def to_slot_layout(self) -> None:
        """Copy gradients whose memory order is not that of their slot, as users may set them.

        (An expanded gradient, for example, cannot be written to.)

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        for slot, param in enumerate(self.params):
            if param.grad is not None:
                self._to_slot_layout(slot, param.grad)

    # Into the buffer

    def pack(
        self,
        segment: Segment,
        used: Sequence[bool],
        scale: float,
        header: bytes = b"",
        earlier: bool = True,
        without_gradient: Callable[[], Collection[int]] = set,
    ) -> None:
        """Write ``scale * .grad`` of the segment's parameters, and ``used``, into the buffer.

        One launch. A ``scale`` of zero writes zeros, even for NaN.

        Args:
            segment: all its gradients are final.
            used: for each of its parameters, whether this rank has used it.
            scale: factor of the gradients.
            header: of this rank, in the first bucket.
            earlier: a parameter that is not used, but has a gradient of an earlier backward,
                contributes that gradient, as it would on this rank alone.
            without_gradient: ids of the parameters that count as used although they have no
                gradient. It counts as zero.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        first, last = segment.first, segment.last
        if self.flat is None:
            self.allocate()
        grads: list[Any] = list(map(_grad_of, segment.params))
        if NoneType in map(type, grads):
            self.wants_flags = True
            # (A parameter may have been used under no_sync, and its gradient dropped since.)
            known, params = without_gradient(), segment.params
            used = [
                flag and (grad is not None or id(param) in known)
                for flag, grad, param in zip(used, grads, params, strict=True)
            ]
        self.used[first:last] = used
        self._counters.flattens += 1
        # Whoever sets .data of a gradient (module.to(), for example) has moved the view itself.
        if self.has_views:
            addresses = list(map(Tensor.data_ptr, self.flat.views[first:last]))
            if addresses != self.flat.addresses[first:last]:
                self.flat.mend_views()
        if False in used:
            for slot, flag in enumerate(used):
                if grads[slot] is not None and not flag:
                    grads[slot] = self._stash(first + slot, grads[slot])
        for slot in segment.may_be_flagged:
            grad = grads[slot - first]
            if grad is not None and (grad.is_conj() or grad.is_neg()):
                grads[slot - first] = self._to_slot_layout(slot, grad)
        flat = segment.flat
        if self._kernels.takes_pointers and not segment.fits(*grads):
            given, grads = grads, self._all_to_slot_layout(segment, grads)
            if NoneType not in map(type, grads) and all(map(is_, given, grads)):
                segment.fits = like(grads)
        sources = grads if scale else [None] * len(grads)
        if not earlier:
            sources = [grad if flag else None for grad, flag in zip(sources, used, strict=True)]
        if self.unbuffered is not None:
            grads, sources, scale = self._set_unbuffered(grads, sources, scale)
        # The kernels of the CPU take any strides, and raise if a gradient does not fit. Then the
        # check below raises an error that names it.
        try:
            if flat.is_part:
                header = b""
            elif self.checked is not None and self.quantization is None:  # as in _with_places
                header += bytes(self.checked[1])
            self._kernels.flatten(flat, sources, used, scale, header)
        except RuntimeError:
            self._all_to_slot_layout(segment, grads)
            raise
        if not self.has_views:
            self._grads[first:last] = grads
            return
        try:
            if False in used:
                self._become_views(segment, grads)
            elif not all(map(is_, grads, views := self.flat.views[first:last])):
                for param, view in zip(segment.params, views, strict=True):
                    param.grad = view  # which frees the gradient
        except RuntimeError:  # torch checks the dtype
            self._all_to_slot_layout(segment, grads)
            raise

    def _become_views(self, segment: Segment, grads: Sequence[Any]) -> None:
        """Replace used gradients, which are packed, by views of the buffer; some are not used."""

    def _set_unbuffered(
        self, grads: list[Any], sources: list[Any], scale: float
    ) -> tuple[Any, ...]:
        """Set :attr:`unbuffered`; returns what is flattened."""
        raise NotImplementedError

    def finish_unbuffered(self, factor: Tensor | None, flags: Sequence[float] = ()) -> None:
        """The tensors of :attr:`unbuffered` are reduced: see :meth:`unpack`."""

    def note_incoming(self, incoming: Sequence[Tensor | None]) -> None:
        """Gradients that the engine is handing to ``.grad``, and will drop."""

    def copy_unbuffered(self) -> None:
        """Do not reduce the gradients that are packed next where they lie: others read them."""

    def drop_gradients(self, segment: Segment) -> None:
        """Forget the gradients of a packed segment, until :meth:`fetch_gradients`."""
        self._grads[segment.first : segment.last] = [None] * len(segment.params)

    def fetch_gradients(self, segment: Segment) -> None:
        """Take the current ``.grad`` of a packed segment: the means will overwrite them."""
        grads: list[Any] = list(map(_grad_of, segment.params))
        if self._kernels.takes_pointers:
            grads = self._all_to_slot_layout(segment, grads)
        self._grads[segment.first : segment.last] = grads

    def finish_trailer(self, header: bytes = b"") -> None:
        """Write used flags and headers, after all of several segments are packed."""
        self.packed.write_trailer(self.used, self._with_places(header))

    def fill_nan(self, header: bytes = b"") -> None:
        """Fill the buffer with NaN instead of gradients."""
        if self.flat is None:
            self.allocate()
        self._fill_nan([False] * len(self.params), header)

    def overwrite_nan(self) -> None:
        """Replace the packed gradients by NaN. Not for the first bucket, which has a header."""
        # (Some rank has to see it.)
        self._fill_nan(self.used if any(self.used) else [True] * len(self.used), b"")

    def _fill_nan(self, used: Sequence[bool], header: bytes) -> None:
        self.packed.fill_nan()
        self.packed.write_trailer(used, self._with_places(header))
        if self.checked is not None:
            self.note_not_finite()

    def _with_places(self, header: bytes) -> bytes:
        """With one more byte a rank, if gradients are checked, for :meth:`note_not_finite`.

        (A message of a quantised bucket has flags by rank instead.)
        """
        if self.checked is None or self.quantization is not None:
            return header
        return header + bytes(self.checked[1])

    def note_not_finite(self, which: Tensor | None = None) -> None:
        """These gradients, bool ``(n,)``, or all, are packed, and are not finite: tell all ranks.

        A flag that is not a number says so, and behind the headers each rank has a place.
        """
        assert self.checked is not None
        if which is None:
            which = torch.ones(len(self.params), dtype=torch.bool, device=self.params[0].device)
        self.packed.note_not_finite(which, *self.checked)

    def not_finite(self) -> tuple[Tensor, Tensor]:
        """After the reduction: which gradients were not finite, and on which ranks one was."""
        assert self.checked is not None
        found: tuple[Tensor, Tensor] = self.flat.not_finite(self.checked[1])
        return found

    # Out of the buffer

    def unpack(self, factor: Tensor | None = None, flags: Sequence[float] | None = None) -> None:
        """Write the reduced gradients, times ``factor``, into ``.grad``.

        ``factor`` is one fp64 element on the bucket's device. The ``.grad`` of a parameter that no
        rank used stays as it is.

        One launch. If another rank used a parameter that has no ``.grad`` here, ``.grad`` is made.
        Only then the host has to read the flags, or has read them for several buckets together.
        """
        if self.owned is not None and not self._kernels.takes_pointers:
            self._drop_others()
        grads, has_missing = self._grads, self.wants_flags
        made: dict[int, Tensor] = {}
        casts = self._wire_dtype is not self.gradient_dtype
        sum_into = self.exchange.sum_into
        in_kernel = self._kernels.takes_pointers or casts or sum_into is not None
        if factor is not None and not in_kernel:  # one call is less than one for each gradient
            if factor.item() != 1:
                self.flat.payload.mul_(factor.item())
            factor = None
        if has_missing:
            mine = range(len(grads)) if self.owned is None else self.owned.mine
            for slot, flag in enumerate(self._on_host(flags)):
                if flag and grads[slot] is None and slot in mine:
                    if in_kernel:
                        grads[slot] = made[slot] = self._empty_gradient(slot)
                    else:  # on the CPU a copy here costs no more
                        self.params[slot].grad = self.flat.views[slot].clone()
        if sum_into is not None:
            self._counters.unflattens += 1
            sum_into(grads, factor)
        elif not has_missing or set(map(type, grads)) != {NoneType}:
            self._counters.unflattens += 1
            self._kernels.unflatten(self.flat, grads, factor)
        for slot, grad in made.items():
            self.params[slot].grad = grad
        # References here would outlive zero_grad.
        self._grads, self.wants_flags = [None] * len(grads), False
        if self.owned is not None:
            self._drop_others()

    def _drop_others(self) -> None:
        """Drop the gradients that other ranks own.

        (On a GPU they are unflattened before: a table without them would have to be uploaded.)
        """
        assert self.owned is not None
        for slot, param in enumerate(self.params):
            if slot not in self.owned.mine:
                param.grad = self._grads[slot] = None

    def _on_host(self, flags: Sequence[float] | None) -> Sequence[float]:
        """The reduced flags: read them, unless they have been."""
        found: Sequence[float] = self.flat.flags.tolist() if flags is None else flags
        return found

    def discard(self) -> None:
        """Leave ``.grad`` as it is."""
        self._grads, self.wants_flags = [None] * len(self._grads), False
        if self.exchange.sum_into is not None:
            self.exchange.sum_into(self._grads, None)

    def release(self) -> None:
        """The backward is over: free the memory of a lazy bucket."""
        if self.is_lazy and self.flat is not None:
            record_use(*self.flat.memory)  # it was allocated on the stream of a gradient
            if (tables := self._kernels.tables(self.flat)) is not None:
                tables.forget_launches()  # they hold the memory
            self._released = self.flat.flags.clone(), tables
            self.flat = self.packed = None
            for segment in self.segments:
                segment.flat = None

    def capture(self) -> None:
        """The capture of a CUDA graph that reduces this bucket begins."""
        tables = self._released[1] if self.flat is None else self._kernels.tables(self.flat)
        if tables is not None:
            tables.capture()

    def retire(self) -> None:
        """This bucket will be dropped, perhaps while a GPU still unflattens it."""
        if self.flat is not None:
            record_use(*self.flat.memory)
            if (tables := self._kernels.tables(self.flat)) is not None:
                record_use(*tables.memory)

    # Gradients that do not have the memory order of their slot

    def in_buffer(self) -> dict[Parameter, Tensor]:
        """Gradients that are views of this bucket's buffer."""
        return {}

    def adopt(self, in_buffer: dict[Parameter, Tensor]) -> None:
        """Move gradients from the buffer of a former bucket, and remove them from ``in_buffer``."""

    def _empty_gradient(self, slot: int) -> Tensor:
        param = self.params[slot]
        strides = self._layout.strides[slot]
        return torch.empty_strided(
            param.shape, strides, dtype=self.gradient_dtype, device=param.device
        )

    def _stash(self, slot: int, grad: Tensor) -> Tensor:
        """A gradient that this backward did not make, as a tensor that can be written to.

        (The user may have set any tensor, an expanded one for example.)
        """
        return self._to_slot_layout(slot, grad)

    def _all_to_slot_layout(self, segment: Segment, grads: list[Any]) -> list[Any]:
        """The gradients, each in the memory order of its slot."""
        return [
            None if grad is None else self._to_slot_layout(slot, grad)
            for slot, grad in enumerate(grads, segment.first)
        ]

    def _check_kind(self, slot: int, grad: Tensor) -> None:
        """Raise a GradientError if ``grad`` has another shape or dtype than its parameter."""
        param = self.params[slot]
        dtype = gradient_dtype(param)
        if grad.shape != param.shape or grad.dtype != dtype:
            raise GradientError(
                f"the gradient of {self.names[slot]!r} (bucket {self.index}) should be "
                f"{tuple(param.shape)} {dtype} like its parameter, but is "
                f"{tuple(grad.shape)} {grad.dtype}"
            )

    def check_dtype(self, slot: int) -> None:
        """Raise a GradientError if gradients of this parameter have another dtype by now."""
        param = self.params[slot]
        if gradient_dtype(param) is not self.gradient_dtype:
            raise GradientError(
                f"parameter {self.names[slot]!r} (bucket {self.index}) had gradients of "
                f"{self.gradient_dtype} when it was wrapped, and has gradients of "
                f"{gradient_dtype(param)} now: wrap the module again after such a change"
            )

    def _to_slot_layout(self, slot: int, grad: Tensor) -> Tensor:
        """``grad`` itself if it has the memory order of its slot, else a copy, set as ``.grad``.

        Raises:
            GradientError: the gradient is sparse, or has another shape or dtype than expected.
        """
        param, layout = self.params[slot], self._layout
        if grad.layout is not torch.strided:
            raise GradientError(
                f"the gradient of {self.names[slot]!r} (bucket {self.index}) is "
                f"{grad.layout}, and was expected to be dense. Sparse gradients are supported for "
                "nn.Embedding and nn.EmbeddingBag that had sparse=True when they were wrapped or "
                "added: make this gradient dense, or use such a layer"
            )
        self._check_kind(slot, grad)
        self.check_dtype(slot)
        if tuple(param.shape) != layout.shapes[slot]:
            raise GradientError(
                f"parameter {self.names[slot]!r} (bucket {self.index}) was {layout.shapes[slot]} "
                f"when it was wrapped and is now {tuple(param.shape)}: wrap the module again after "
                "such a change"
            )
        order = dims_by_stride(grad.shape, grad.stride())
        is_flagged = grad.is_conj() or grad.is_neg()
        if not is_flagged and (
            grad.numel() == 0
            or (order is not None and order == dims_by_stride(grad.shape, layout.strides[slot]))
        ):
            return grad
        self._counters.layout_copies += 1
        strides = layout.strides[slot]
        copy = torch.empty_strided(
            param.shape, strides, dtype=self.gradient_dtype, device=param.device
        )
        param.grad = copy.copy_(grad)
        return param.grad


class JointUnpack:
    """Buckets of a set, unpacked together once the last one of them is reduced.

    On a GPU, where a launch for each bucket would cost the host more time than the device saves.
    There is one for the buckets of each dtype. See :meth:`fits`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        groups: dict[Any, list[Bucket]] = {}
        for bucket in buckets:
            groups.setdefault((bucket.gradient_dtype, bucket.wire_dtype), []).append(bucket)
        self._groups: list[tuple[list[Bucket], list[int], Any]] = []
        for group in groups.values():
            make: Any = group[0]._kernels.joint_unflatten
            sizes = [len(each.params) for each in group]
            self._groups.append((group, sizes, make([bucket.flat for bucket in group])))

    @staticmethod
    def fits(buckets: Sequence[Bucket]) -> bool:
        """Whether none of these buckets has to be unpacked by itself."""
        return not any(
            each.is_lazy or each.is_sparse or each.owned or each._kernels.joint_unflatten is None
            for each in buckets
        )

    def unpack(self, factor: Tensor | None) -> None:
        """Write the reduced gradients, times ``factor``, into ``.grad``: see :meth:`Bucket.unpack`.

        No bucket may want flags.
        """
        for buckets, sizes, unflatten in self._groups:
            has_views = buckets[0].has_views
            if factor is not None or not has_views:
                buckets[0]._counters.unflattens += 1
                unflatten(list(map(_views_of if has_views else _packed_of, buckets)), factor)
            for bucket, size in zip(buckets, sizes, strict=True):
                if bucket.unbuffered is not None:
                    bucket.finish_unbuffered(factor)
                bucket._grads = [None] * size

    def retire(self) -> None:
        """It will be dropped, perhaps while a GPU still unflattens."""
        record_use(*(each for _, _, unflatten in self._groups for each in unflatten.memory))
