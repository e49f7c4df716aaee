"""How gradients travel: in which dtype (``reduce_dtype``), or quantised (``compression``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import MixedPrecision, backend_name
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.exact import Exact
from tritonddp.buckets.residuals import Feedback
from tritonddp.coordination.counters import Counters
from tritonddp.features.auto_compression.probe import Figures
from tritonddp.kernels.dispatch import Kernels, quantizing, select_quantized
from tritonddp.kernels.quantized.buffer import MessageLayout, Quantization, Residuals

# What the constructor's ``reduce_dtype`` may be.
REDUCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What its ``compression`` may be, and the dtypes of quantised numbers. What ``"auto"`` takes for
# buckets that it quantises (:mod:`tritonddp.features.auto_compression.planner`) is kept to what all
# hardware has.
AUTO = "auto"
COMPRESSIONS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, AUTO: torch.int8}
# What quantised gradients are, before and after.
_QUANTIZED = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Wire:
    """How gradients travel.

    Attributes:
        reduce_dtype: the dtype of all dense real ones, fp64 too; ``None`` if each travels in its
            own. Complex and sparse gradients always do.
        compression: a key of :data:`COMPRESSIONS`, ``None`` if nothing is quantised. Then
            gradients of fp64, complex and sparse ones, and buckets in which all are exact travel
            as without it.
        error_feedback: what quantisation leaves out is added to later gradients.
        exact: which parameters' gradients are not quantised.
        figures: by which :data:`AUTO` chooses, once they are measured.
    """

    reduce_dtype: torch.dtype | None = None
    compression: str | None = None
    error_feedback: bool = True
    exact: Exact | None = None
    figures: Figures | None = None

    @classmethod
    def of(
        cls,
        reduce_dtype: Any,
        mixed_precision: MixedPrecision | None,
        compression: Any = None,
        error_feedback: bool = True,
        exact: Exact | None = None,
    ) -> Wire:
        """The constructor's arguments, of which ``mixed_precision`` has been looked at already.

        Raises:
            TypeError: ``reduce_dtype`` is no dtype.
            ValueError: gradients cannot be reduced in it, the two contradict each other, or
                ``compression`` is unknown.
        """
        if compression is not None and not (
            isinstance(compression, str) and compression in COMPRESSIONS
        ):
            raise ValueError(
                f"compression should be one of {', '.join(map(repr, COMPRESSIONS))} or None, got "
                f"{compression!r}"
            )
        names = ", ".join(map(str, REDUCE_DTYPES))
        if reduce_dtype is not None and not isinstance(reduce_dtype, torch.dtype):
            raise TypeError(f"reduce_dtype should be one of {names}, got {reduce_dtype!r}")
        if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype should be one of {names}, got {reduce_dtype}")
        if mixed_precision is None:
            return cls(reduce_dtype, compression, error_feedback, exact)
        low = mixed_precision.reduce_dtype
        if None not in (low, reduce_dtype) and low != reduce_dtype:
            raise ValueError(
                f"reduce_dtype={reduce_dtype} contradicts mixed_precision, whose reduce_dtype is "
                f"{low}: give one of them"
            )
        dtype = reduce_dtype or low or mixed_precision.param_dtype
        return cls(dtype, compression, error_feedback, exact)

    def check(self, group: dist.ProcessGroup, devices: Iterable[torch.device]) -> None:
        """Can gradients on these devices travel like that?

        Raises:
            RuntimeError: quantised ones cannot: the backend of a device lacks what it takes, or the
                device has no such numbers.
        """
        if self.compression is None or group.size() == 1:
            return
        for device in sorted(set(devices), key=str):
            wanted = "gloo" if device.type == "cpu" else "nccl"
            backend = backend_name(group, device)
            if backend != wanted:
                raise RuntimeError(
                    f"compression={self.compression!r} needs {wanted} for {device.type!r}, but the "
                    f"process group has {backend}: give one that has, or leave it out"
                )
            select_quantized(device, COMPRESSIONS[self.compression])

    def description(self, params: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        """Of what has to be alike on all ranks for these parameters, by option."""
        if self.compression is None or self.exact is None:
            return {}
        names, tensors = [name for name, _ in params], [param for _, param in params]
        found = self.exact.find(names, tensors)
        return {
            "compression": self.compression,
            "error_feedback": self.error_feedback,
            "exact": [name for name, is_exact in zip(names, found, strict=True) if is_exact],
        }

    def casts(self, gradient: Tensor) -> bool:
        """Whether ``gradient``, or that of a parameter, travels in another dtype than its own."""
        dtype = gradient.dtype
        return self.reduce_dtype not in (None, dtype) and dtype.is_floating_point

    def buckets(
        self, bucket_class: Callable[..., Bucket], copying: Callable[..., Bucket]
    ) -> Callable[..., Bucket]:
        """What makes buckets that are not quantised.

        Args:
            bucket_class: for gradients that travel in their own dtype.
            copying: for all others, which cannot live in the buffer.
        """
        if self.reduce_dtype is None:
            return bucket_class

        def make(index: int, params: Sequence[Parameter], *args: Any, **kwargs: Any) -> Bucket:
            if not self.casts(params[0]):
                return bucket_class(index, params, *args, **kwargs)
            return copying(index, params, *args, **kwargs, wire_dtype=self.reduce_dtype)

        return make

    def quantized_buckets(
        self,
        plain: Callable[..., Bucket],
        copying: Callable[..., Bucket],
        group: dist.ProcessGroup,
        feedback: Feedback,
    ) -> Callable[..., Bucket]:
        """What makes the buckets of backwards, but for :data:`AUTO`, which chooses what does.

        Args:
            plain: of gradients that are not quantised.
            copying: of those that are, which cannot live in the buffer.
            group: the ranks. Where there is but one nothing travels, and nothing is quantised.
            feedback: has what was left out of gradients in former buckets.
        """
        rank, size = group.rank(), group.size()
        if self.compression in (None, AUTO) or size == 1:
            return plain
        numbers = COMPRESSIONS[self.compression]

        def make(
            index: int,
            params: Sequence[Parameter],
            names: Sequence[str],
            kernels: Kernels,
            counters: Counters,
            ballots: int = 0,
        ) -> Bucket:
            exact = [True] * len(params)
            if params[0].dtype in _QUANTIZED and self.exact is not None:
                exact = self.exact.find(names, params)
            if all(exact):
                return plain(index, params, names, kernels, counters, ballots=ballots)
            device = params[0].device
            numels = [param.numel() for param in params]
            quantized = [not each for each in exact]
            has_marks = kernels.marks is not None
            message = MessageLayout.of(numels, quantized, size, ballots, has_marks)
            residuals = Residuals.zeros(message, rank, device) if self.error_feedback else None
            quantization = Quantization(message, numbers, rank, residuals)
            bucket = copying(
                index,
                params,
                names,
                quantizing(kernels, device, quantization),
                counters,
                ballots=ballots,
                wire_dtype=torch.float32,
            )
            bucket.quantization = quantization
            feedback.hand_over(bucket)
            return bucket

        return make
