"""A bucket: gradients that are reduced together.

A bucket owns one :class:`FlatBuffer`. Its
:class:`~tritonddp.buckets.grad_storage.grad_storage.GradStorage` defines how gradients get into the
buffer and out of it. Its :class:`~tritonddp.buckets.exchange.BucketExchange` defines how the buffer
is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import record_use
from tritonddp._torch import like
from tritonddp.buckets.exchange import BucketExchange
from tritonddp.buckets.wire_formats import WireFormat
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.kernels.dispatch import Kernels, gradient_dtype
from tritonddp.kernels.flat_buffer import FlatBuffer, shared
from tritonddp.kernels.memory_order import dims_by_stride, gradient_strides

if TYPE_CHECKING:
    from tritonddp.buckets.grad_storage.grad_storage import GradStorage
    from tritonddp.kernels.device_tables import DeviceTables


def _are_unknown(*_: Any) -> bool:
    """Return False: the value of :attr:`Segment.fits` before the first gradients."""
    return False


class GradientError(RuntimeError):
    """A gradient does not fit into its bucket."""


class Owned(NamedTuple):
    """The rank to which each slot of a bucket is reduced.

    Attributes:
        slots: consecutive ranges of slots, one per rank; some may be empty.
        mine: the slots of this rank.
    """

    slots: tuple[range, ...]
    mine: range

    def elements(self, flat: FlatBuffer) -> list[tuple[int, int]]:
        """Return for each rank the start and end of its elements in ``flat.data``."""
        width = flat.dtype.itemsize // flat.data.element_size()  # 2 for complex elements
        starts = [*(width * offset for offset in flat.layout.offsets), len(flat.payload)]
        return [(starts[slots.start], starts[slots.stop]) for slots in self.slots]


class Segment:
    """Consecutive slots of a bucket that one launch flattens. A slot holds one parameter.

    On a GPU a segment is the whole bucket. On the CPU it is small enough that its gradients are
    still in the cache when they are flattened.

    Attributes:
        first, last: its slots are ``[first, last)``.
        is_whole: it contains all slots of the bucket.
        params: the parameters in these slots.
        may_be_flagged: slots whose gradient may have the conjugate or negative bit.
        flat: its part of the bucket's buffer; ``None`` while the buffer has no memory.
        fits: returns True if gradients match earlier ones in dtype, device, shapes and strides;
            the earlier ones had the memory order of the slots.
    """

    __slots__ = ("first", "fits", "flat", "is_whole", "last", "may_be_flagged", "params")

    def __init__(self, first: int, last: int, params: Sequence[Parameter]) -> None:
        self.first = first
        self.last = last
        self.is_whole = last - first == len(params)
        self.params = list(params[first:last])
        # A complex gradient may have the conjugate bit. A real gradient that is a part of a
        # conjugate may have the negative bit. If it has several elements, autograd copies it.
        self.may_be_flagged = [
            slot
            for slot, param in enumerate(self.params, first)
            if param.is_complex() or param.numel() == 1
        ]
        self.flat: Any = None
        self.fits: Callable[..., bool] = _are_unknown

    def expect(self, grads: Sequence[Tensor]) -> None:
        """Record that these gradients fit, and so do all gradients like them."""
        self.fits = like(grads)


class Bucket:
    """Parameters whose gradients are reduced together, in one flat buffer.

    Args:
        index, params, names, storage, owned: see below.
        kernels: for the device and dtype of the gradients.
        counters: count launches.
        headers: size of the headers of all ranks in bytes; the headers are sent in this bucket.
        wire: see below; by default gradients are sent in their own dtype.
        lazy: the buffer has memory only from the first gradient of a backward to its end.
            Gradients that are views of it keep it alive until they are dropped.
        checked: this rank and the number of ranks, if all ranks must learn whose gradients are
            not finite, see :meth:`note_not_finite`.

    Attributes:
        index: position in the launch order, identical on all ranks.
        params: the parameters, in launch order.
        names: their names, for error messages.
        storage: where their gradients are stored; packs (flattens) and unpacks them.
        exchange: sums the bucket over the ranks.
        gradient_dtype: dtype of ``.grad``, common to all parameters.
        shapes, strides: shapes and strides of the gradients in the buffer.
        flat: the buffer that the collective sends; ``None`` while a lazy bucket has no memory.
        packed: the buffer that gradients are flattened into: ``flat``, or shared memory that
            other ranks read.
        segments: the parts of the bucket that are flattened in one launch each.
        nbytes: bytes sent: payload and trailer (used flags and headers).
        sent_flags: for each packed slot, whether this rank has a gradient for it.
        places: bytes after the headers, one per rank, for :meth:`note_not_finite`, if gradients
            are checked. Empty for a message, which has separate flags of each rank.
        wire: the format in which gradients are sent.
        quantization: quantization of ``wire``; ``None`` if gradients are not quantized.
        owned: each gradient is reduced to one rank, and ``.grad`` becomes ``None`` on the other
            ranks. ``None`` if gradients are reduced to all ranks.
        others: the slots that other ranks own.
        is_lazy: see above.
    """

    exchange: BucketExchange

    def __init__(
        self,
        index: int,
        params: Sequence[Parameter],
        names: Sequence[str],
        storage: GradStorage,
        kernels: Kernels,
        counters: Counters,
        headers: int = 0,
        wire: WireFormat | None = None,
        lazy: bool = False,
        owned: Owned | None = None,
        checked: tuple[int, int] | None = None,
    ) -> None:
        self.index = index
        self.owned = owned
        self.others = [] if owned is None else sorted({*range(len(params))} - {*owned.mine})
        self.params = list(params)
        self.names = list(names)
        self.storage = storage
        self.kernels = kernels
        self.counters = counters
        self.gradient_dtype = gradient_dtype(params[0])
        self.wire = wire or WireFormat(self.gradient_dtype)
        self.is_lazy = lazy
        self.sent_flags = [False] * len(params)
        self.checked, self._headers = checked, headers
        self.places = b"" if checked is None or self.wire.is_message else bytes(checked[1])
        self.shapes = shared(tuple(param.shape) for param in params)
        self.strides = shared(map(gradient_strides, params))
        layout = storage.layout(self, headers + len(self.places))
        self._layout = self.wire.begin(layout, params[0].device)
        self.quantization = self.wire.quantization
        self.segments = [Segment(*cut, self.params) for cut in kernels.segments(self._layout)]
        self.flat: Any = None
        # From a released buffer: its reduced used flags, and its tables.
        self._released: tuple[Tensor | None, DeviceTables | None] = None, None
        self.allocate()
        flat: Any = self.flat
        self.nbytes: int = flat.nbytes
        self.release()

    def is_large(self) -> bool:
        """Return True if gradients on the CPU are so large that each is worth a separate call.

        They must be sent in their own dtype and must not be views: an exchange may sum them in
        ``.grad``.
        """
        casts = self.wire.flat_dtype is not self.gradient_dtype
        return self.kernels.are_large(self._layout) and not casts and not self.storage.has_views

    def allocate(self) -> None:
        """Allocate the buffer."""
        flat = self._buffer(self.params[0].device)
        _, tables = self._released
        if tables is None:
            self.kernels.tables(flat)
        else:
            flat.tables = tables
        self.flat = flat
        self._pack_into(flat)

    def _buffer(self, device: torch.device, memory: Tensor | None = None) -> Any:
        given = () if memory is None else (memory,)
        flat = self.kernels.buffer(self._layout, self.wire.flat_dtype, device, *given)
        flat.headers = flat.headers[: self._headers]  # without the places of ranks after them
        return flat

    def compile_kernels(self, is_joint: bool) -> None:
        """Compile all kernels that a step may need, so that no rank waits for it later.

        Args:
            is_joint: the bucket is unpacked together with other buckets.
        """
        is_released = self.flat is None
        if is_released:
            self.allocate()
        self.kernels.compile(self.flat, self.gradient_dtype, self.storage.has_views, is_joint)
        if is_released:
            self.release()

    def _pack_into(self, flat: Any) -> None:
        self.packed = flat
        for segment in self.segments:
            segment.flat = flat if segment.is_whole else flat.part(segment.first, segment.last)

    def connect(self, exchange: BucketExchange, memory: Tensor | None = None) -> None:
        """Reduce the bucket with ``exchange``.

        By default the exchange reduces the flat buffer in place. With ``memory``, uint8 zeros
        ``(nbytes,)`` that the other ranks read, the exchange sums what all ranks have packed there.
        Only for buckets on the CPU that are not lazy, sparse or quantized.
        """
        self.exchange = exchange
        if memory is not None:
            self._pack_into(self._buffer(memory.device, memory))
        elif self.packed is not self.flat:
            self._pack_into(self.flat)

    def move(self, memory: Tensor) -> None:
        """Replace the buffer by ``memory``, uint8 zeros ``(nbytes,)`` on the CPU.

        Move the trailer, and gradients that are views of the buffer.
        """
        first, data, in_buffer = len(self.flat.payload), self.flat.data, self.in_buffer()
        self.flat = self._buffer(data.device, memory)
        self.flat.data[first:] = data[first:]
        self._pack_into(self.flat)
        self.adopt(in_buffer)

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype in which most gradients are sent between hosts."""
        return self.wire.inter_host

    @property
    def title(self) -> str:
        """Index and parameters, for error messages."""
        return f"bucket {self.index} ({listed(self.names)})"

    def rank_counts(self) -> Tensor:
        """Return for each parameter the number of ranks that used it in the last reduction."""
        if self.flat is not None:
            return self.flat.flags
        counts, _ = self._released
        return torch.zeros(len(self.params), device="cpu") if counts is None else counts

    # The trailer

    def finish_trailer(self, header: bytes = b"") -> None:
        """Write used flags and headers, after all segments are packed, if there are several."""
        self.packed.write_trailer(self.sent_flags, header + self.places)

    def note_not_finite(self, which: Tensor | None = None) -> None:
        """Tell all ranks that packed gradients are not finite.

        The used flag of such a gradient becomes NaN, and this rank's byte after the headers becomes
        1. ``which`` selects the gradients, bool ``(n,)``; by default all.
        """
        assert self.checked is not None
        if which is None:
            which = torch.ones(len(self.params), dtype=torch.bool, device=self.params[0].device)
        self.packed.note_not_finite(which, *self.checked)

    def not_finite(self) -> tuple[Tensor, Tensor]:
        """Return which reduced gradients were not finite, and which ranks had such gradients."""
        assert self.checked is not None
        found: tuple[Tensor, Tensor] = self.flat.not_finite(self.checked[1])
        return found

    # The memory of the buffer

    def release(self) -> None:
        """Free the memory of a lazy bucket, before and after a backward."""
        if self.is_lazy and self.flat is not None:
            record_use(*self.flat.memory)  # it was allocated on the stream of a gradient
            if (tables := self.kernels.tables(self.flat)) is not None:
                tables.forget_launches()  # they hold the memory
            self._released = self.flat.flags.clone(), tables
            self.flat = self.packed = None
            for segment in self.segments:
                segment.flat = None

    def capture(self) -> None:
        """Prepare for the capture of a CUDA graph that reduces this bucket."""
        tables = self._released[1] if self.flat is None else self.kernels.tables(self.flat)
        if tables is not None:
            tables.capture()

    def retire(self) -> None:
        """Prepare to drop this bucket, perhaps while a GPU still unflattens it."""
        if self.flat is not None:
            record_use(*self.flat.memory)
            if (tables := self.kernels.tables(self.flat)) is not None:
                record_use(*tables.memory)

    def in_buffer(self) -> dict[Parameter, Tensor]:
        """Return the gradients that are views of this bucket's buffer."""
        if self.flat is None or not self.storage.has_views:
            return {}
        pairs: Any = zip(self.params, self.flat.views, strict=True)
        return {param: view for param, view in pairs if param.grad is view}

    def adopt(self, in_buffer: dict[Parameter, Tensor]) -> None:
        """Move gradients here from a former bucket; remove them from ``in_buffer``."""
        if not in_buffer or not self.storage.has_views:
            return
        if self.flat is None:
            self.allocate()
        for param, view in zip(self.params, self.flat.views, strict=True):
            grad = in_buffer.pop(param, None)
            if grad is not None:
                param.grad = view.copy_(grad)

    # Gradients whose memory order differs from their slot

    def copy_to_slot_layout(self) -> None:
        """Copy gradients whose memory order differs from their slot, as users may set them.

        An expanded gradient, for example, cannot be written to. Sparse gradients are skipped.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        for segment in () if self.storage.is_sparse else self.segments:
            self.all_to_slot_layout(segment, [param.grad for param in segment.params])

    def empty_gradient(self, slot: int) -> Tensor:
        """Return an uninitialized gradient in the memory order of its slot."""
        param = self.params[slot]
        return torch.empty_strided(
            param.shape, self.strides[slot], dtype=self.gradient_dtype, device=param.device
        )

    def all_to_slot_layout(self, segment: Segment, grads: list[Any]) -> list[Any]:
        """Return the gradients, each in the memory order of its slot."""
        return [
            None if grad is None else self.to_slot_layout(slot, grad)
            for slot, grad in enumerate(grads, segment.first)
        ]

    def check_kind(self, slot: int, grad: Tensor) -> None:
        """Raise a GradientError if the shape or dtype of ``grad`` does not match its parameter."""
        param = self.params[slot]
        dtype = gradient_dtype(param)
        if grad.shape != param.shape or grad.dtype != dtype:
            raise GradientError(
                f"the gradient of {self.names[slot]!r} (bucket {self.index}) should match its "
                f"parameter, {tuple(param.shape)} {dtype}, but is {tuple(grad.shape)} {grad.dtype}"
            )

    def check_dtype(self, slot: int) -> None:
        """Raise a GradientError if the gradient dtype of this parameter has changed."""
        param = self.params[slot]
        if gradient_dtype(param) is not self.gradient_dtype:
            raise GradientError(
                f"the gradient dtype of parameter {self.names[slot]!r} (bucket {self.index}) "
                f"changed from {self.gradient_dtype} to {gradient_dtype(param)} after the module "
                "was wrapped. Wrap the module again after such a change"
            )

    def to_slot_layout(self, slot: int, grad: Tensor) -> Tensor:
        """Return ``grad`` if it has the memory order of its slot, else a copy, set as ``.grad``.

        Raises:
            GradientError: the gradient is sparse, or has an unexpected shape or dtype.
        """
        param = self.params[slot]
        if grad.layout is not torch.strided:
            raise GradientError(
                f"the gradient of {self.names[slot]!r} (bucket {self.index}) should be dense, but "
                f"is {grad.layout}. Sparse gradients are supported only for nn.Embedding and "
                "nn.EmbeddingBag layers that had sparse=True when they were wrapped or added. Make "
                "this gradient dense, or use such a layer"
            )
        self.check_kind(slot, grad)
        self.check_dtype(slot)
        if tuple(param.shape) != self.shapes[slot]:
            raise GradientError(
                f"the shape of parameter {self.names[slot]!r} (bucket {self.index}) changed from "
                f"{self.shapes[slot]} to {tuple(param.shape)} after the module was wrapped. Wrap "
                "the module again after such a change"
            )
        order = dims_by_stride(grad.shape, grad.stride())
        is_flagged = grad.is_conj() or grad.is_neg()
        if not is_flagged and (
            grad.numel() == 0
            or (order is not None and order == dims_by_stride(grad.shape, self.strides[slot]))
        ):
            return grad
        self.counters.layout_copies += 1
        param.grad = self.empty_gradient(slot).copy_(grad)
        return param.grad
