"""Where gradients travel: how a bucket is filled and emptied.

A bucket owns one :class:`FlatBuffer`. How its gradients get in and out is the only difference
between the classes of buckets: :class:`Bucket` copies them in and out,
:class:`~tritonddp.buckets.view_bucket.ViewBucket` leaves them in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import storage_holders
from tritonddp.buckets.donation import is_private
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.kernels.dispatch import Kernels
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.memory_order import dims_by_stride, gradient_strides
from tritonddp.kernels.quantized.buffer import Quantization

_dtype_of = attrgetter("dtype")
_grad_of = attrgetter("grad")


class GradientError(RuntimeError):
    """A gradient cannot be put into its bucket."""


@dataclass(frozen=True)
class Segment:
    """Slots ``[first, last)`` of a bucket, which one launch flattens.

    On a GPU that is the whole bucket. On the CPU it is as much as stays in the cache from the
    moment when the gradients are made.
    """

    first: int
    last: int
    flat: FlatBuffer


class Bucket:
    """Parameters whose gradients travel together, copied into the flat buffer and out of it.

    Attributes:
        index: place in the launch order, the same on every rank.
        params: in launch order.
        names: their names, for errors.
        flat: the buffer that the collective sends.
        segments: what is flattened at once, see :class:`Segment`.
        cuts: the slots ``[first, last)`` of each segment.
        quantization: of gradients that travel quantised, else ``None``.
    """

    quantization: Quantization | None = None

    def __init__(
        self,
        index: int,
        params: Sequence[Parameter],
        names: Sequence[str],
        kernels: Kernels,
        counters: Counters,
        ballots: int = 0,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.index = index
        self.params = list(params)
        self.names = list(names)
        self._kernels = kernels
        self._counters = counters
        self._dtypes = {params[0].dtype}
        self._wire_dtype = wire_dtype or params[0].dtype
        # Autograd may hand over a conjugate, or a real number of opposite sign that is a part of
        # one, as a flag on the memory. (Of more than one element it makes the latter row-major.)
        self._may_be_flagged = [
            slot for slot, param in enumerate(params) if param.is_complex() or param.numel() == 1
        ]
        self._used = [False] * len(params)
        # Flattened and not yet unflattened.
        self._grads: list[Tensor | None] = [None] * len(params)
        # Gradients that were there when the backward began, and their versions.
        self._before: dict[int, tuple[Tensor, int]] = {}
        layout = self._make_layout(ballots)
        self.cuts = kernels.segments(layout)
        self._casts = self._wire_dtype not in self._dtypes
        self._cedes = kernels.cedes(layout) and not self._casts
        self._allocate(layout)

    def _make_layout(self, ballots: int) -> Layout:
        return Layout.of(
            [param.shape for param in self.params],
            [gradient_strides(param) for param in self.params],
            self._kernels.alignment,
            ballots,
            self._kernels.marks,
        )

    def _allocate(self, layout: Layout) -> None:
        params = self.params
        self.flat = self._kernels.buffer(layout, self._wire_dtype, params[0].device)
        self.segments = [
            Segment(
                first,
                last,
                self.flat if last - first == len(params) else self.flat.part(first, last),
            )
            for first, last in self.cuts
        ]
        self._unshared = self._memory()

    def _memory(self) -> tuple[Any, ...]:
        """Of the buffer: changes when somebody gets hold of its memory, or does something to it."""
        storage = self.flat.data.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        del storage
        return *place, *storage_holders(self.flat.data)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: payload and trailer."""
        return self.flat.nbytes

    @property
    def wire_dtype(self) -> torch.dtype:
        """In which most of the gradients travel."""
        return self._wire_dtype if self.quantization is None else self.quantization.numbers

    @property
    def flags(self) -> Tensor:
        """After a reduction: on how many ranks it used each parameter."""
        return self.flat.flags

    @property
    def title(self) -> str:
        """Number and parameters, for errors."""
        return f"bucket {self.index} ({listed(self.names)})"

    def begin(self) -> None:
        """A backward begins: see which gradients are there, and whether the buffer is free.

        The buffer is not where somebody still holds a gradient that was ceded (see
        :meth:`unflatten`): because ``zero_grad`` keeps gradients, or because a user does. It is
        theirs then, and this bucket goes on with another one and cedes nothing any more.
        """
        self._grads = [None] * len(self.params)
        grads = list(map(_grad_of, self.params))
        if set(map(type, grads)) == {NoneType}:
            self._before = {}
        else:
            self._before = {
                slot: (grad, grad._version) for slot, grad in enumerate(grads) if grad is not None
            }
        del grads  # or their memory would seem to be held
        if self._cedes and self._memory() != self._unshared:
            self._cedes = False
            self._allocate(self.flat.layout)

    def conform(self) -> None:
        """Gradients that users have made may lie in memory anyhow, even unfit to be written to.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        for slot, param in enumerate(self.params):
            if param.grad is not None:
                self._conform(slot, param.grad)

    def touched(self, slot: int) -> None:
        """The gradient of this slot had come already when :meth:`begin` saw it."""
        grad = self.params[slot].grad
        if grad is not None:
            self._before[slot] = grad, -1

    def untouched(self, segment: Segment) -> list[int]:
        """Slots whose gradient is what it was before: a custom function returned ``None``."""
        return [
            slot
            for slot, (grad, version) in self._before.items()
            if segment.first <= slot < segment.last
            and self.params[slot].grad is grad
            and grad._version == version
        ]

    def flatten(
        self,
        segment: Segment,
        used: Sequence[bool],
        scale: float,
        ballots: Sequence[int] = (),
        earlier: bool = True,
    ) -> None:
        """Write ``scale * .grad`` of the segment's parameters, and ``used``, into the buffer.

        One launch. A parameter without a gradient counts as zero; one that is not ``used`` but
        has a gradient of an earlier backward contributes that, as it would on this rank alone,
        unless ``earlier`` gradients do not count. A ``scale`` of zero makes zeros even of NaN.
        """
        grads = self._flatten(segment, used, scale, ballots, earlier)
        self._grads[segment.first : segment.last] = grads

    def seal(self, ballots: Sequence[int] = ()) -> None:
        """All segments are flattened: complete the trailer."""
        if len(self.segments) > 1:
            self.flat.write_trailer(self._used, ballots)

    def poison(self, ballots: Sequence[int] = ()) -> None:
        """Fill the buffer with NaN instead of gradients."""
        self.flat.poison()
        self.flat.write_trailer([False] * len(self.params), ballots)

    def unflatten(self, factor: Tensor | None = None) -> None:
        """Write the reduced gradients into ``.grad``; parameters nobody used stay as they are.

        ``factor``, one fp64 element on the bucket's device, is multiplied in.

        One launch. Where another rank used a parameter that has no ``.grad`` here, it is made.
        Only then the host has to read the flags.

        On the CPU large gradients are *ceded* instead of copied: ``.grad`` becomes their place in
        the buffer. Only gradients which this backward has made and nobody else has got hold of:
        where one goes unnoticed, another may take its place.
        """
        grads, self._grads = self._grads, [None] * len(self._grads)
        before, self._before = self._before, {}  # or they would outlive zero_grad
        in_kernel = self._kernels.by_address or self._casts
        if factor is not None and not in_kernel:
            # A pass of its own: what is ceded below is not copied, but has to be scaled too.
            if factor.item() != 1:
                self.flat.payload.mul_(factor.item())
            factor = None
        if NoneType in map(type, grads):
            for slot, flag in enumerate(self.flat.flags.tolist()):
                if flag and grads[slot] is None:
                    if in_kernel:
                        grads[slot] = self.params[slot].grad = self._empty_gradient(slot)
                    else:  # no launch to save
                        self.params[slot].grad = self.flat.views[slot].clone()
        if self._cedes:
            for slot, param in enumerate(self.params):
                if self._used[slot] and slot not in before and is_private(param, grads, slot):
                    grads[slot] = None
                    param.grad = self.flat.tensor_at(slot)
        if set(map(type, grads)) != {NoneType}:
            self._counters.unflattens += 1
            self._kernels.unflatten(self.flat, grads, factor)

    def release(self) -> None:
        """The backward is over: a bucket that need not have memory until the next lets it go."""

    def placed_gradients(self) -> dict[Parameter, Tensor]:
        """Gradients that live in this bucket's buffer."""
        return {}

    def adopt(self, placed: dict[Parameter, Tensor]) -> None:
        """Take gradients that live in a former bucket over, removing them from ``placed``."""

    def _empty_gradient(self, slot: int) -> Tensor:
        param = self.params[slot]
        strides = self.flat.layout.strides[slot]
        return torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device)

    def _flatten(
        self,
        segment: Segment,
        used: Sequence[bool],
        scale: float,
        ballots: Sequence[int],
        earlier: bool,
    ) -> list[Tensor | None]:
        """Flatten the segment's gradients, note which are used, and return them."""
        grads = [param.grad for param in self.params[segment.first : segment.last]]
        if NoneType in map(type, grads):
            # Also of a parameter that was used under no_sync, whose gradient was dropped since.
            used = [flag and grad is not None for flag, grad in zip(used, grads, strict=True)]
        self._used[segment.first : segment.last] = used
        self._counters.flattens += 1
        if not all(used):
            for slot, (flag, grad) in enumerate(zip(used, grads, strict=True)):
                if grad is not None and not flag:
                    grads[slot] = self._spare(segment.first + slot, grad)
        for slot in self._may_be_flagged:
            if segment.first <= slot < segment.last:
                grad = grads[slot - segment.first]
                if grad is not None and _is_flagged(grad):
                    grads[slot - segment.first] = self._conform(slot, grad)
        if segment.flat.is_part:
            ballots = ()
        if self._kernels.by_address:
            grads = self._conform_all(segment, grads)
        sources = grads if scale else [None] * len(grads)
        if not earlier:
            sources = [grad if flag else None for grad, flag in zip(sources, used, strict=True)]
        # The kernels of the CPU take any strides, and raise where a gradient is amiss: name it
        # then.
        try:
            self._kernels.flatten(segment.flat, sources, used, scale, ballots)
        except RuntimeError:
            self._conform_all(segment, grads)
            raise
        return grads

    def _spare(self, slot: int, grad: Tensor) -> Tensor:
        """A gradient that this backward did not make: the user may have put anything there.

        Also expanded, which cannot be written to.
        """
        return self._conform(slot, grad)

    def _conform_all(self, segment: Segment, grads: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients, each in the memory order of its slot."""
        layout = segment.flat.layout
        try:
            # Three C loops, 0.15 us a parameter: whatever passes lies in memory as its slot does.
            if (
                tuple(map(Tensor.stride, grads)) == layout.strides  # type: ignore[arg-type]
                and tuple(map(Tensor.numel, grads)) == layout.numels  # type: ignore[arg-type]
                and set(map(_dtype_of, grads)) == self._dtypes
            ):
                return grads
        except (TypeError, AttributeError, RuntimeError):
            pass  # a missing or a sparse gradient: look at each
        return [
            None if grad is None else self._conform(slot, grad)
            for slot, grad in enumerate(grads, segment.first)
        ]

    def _check_kind(self, slot: int, grad: Tensor) -> None:
        """Raise a GradientError if ``grad`` has another shape or dtype than its parameter."""
        param = self.params[slot]
        if grad.shape != param.shape or grad.dtype != param.dtype:
            raise GradientError(
                f"the gradient of {self.names[slot]!r} (bucket {self.index}) should be "
                f"{tuple(param.shape)} {param.dtype} like its parameter, but is "
                f"{tuple(grad.shape)} {grad.dtype}"
            )

    def _conform(self, slot: int, grad: Tensor) -> Tensor:
        """``grad`` itself if it lies in memory as its slot does, else ``.grad`` copied to that.

        Raises:
            GradientError: the gradient is sparse, or has another shape or dtype than expected.
        """
        param, layout = self.params[slot], self.flat.layout
        if grad.layout is not torch.strided:
            raise GradientError(
                f"the gradient of {self.names[slot]!r} (bucket {self.index}) is "
                f"{grad.layout}, and was expected to be dense. Sparse gradients are those of "
                "nn.Embedding and nn.EmbeddingBag that had sparse=True when they were wrapped or "
                "added: make this one dense, or use such a layer"
            )
        self._check_kind(slot, grad)
        if tuple(param.shape) != layout.shapes[slot] or param.dtype not in self._dtypes:
            raise GradientError(
                f"parameter {self.names[slot]!r} (bucket {self.index}) was "
                f"{layout.shapes[slot]} {next(iter(self._dtypes))} when it was wrapped and is now "
                f"{tuple(param.shape)} {param.dtype}: wrap the module again after such a change"
            )
        order = dims_by_stride(grad.shape, grad.stride())
        if not _is_flagged(grad) and (
            grad.numel() == 0
            or (order is not None and order == dims_by_stride(grad.shape, layout.strides[slot]))
        ):
            return grad
        self._counters.layout_copies += 1
        param.grad = self._empty_gradient(slot).copy_(grad)
        return param.grad


def _is_flagged(grad: Tensor) -> bool:
    """Whether the memory of ``grad`` holds its conjugate, or numbers of the opposite sign."""
    return grad.is_conj() or grad.is_neg()
