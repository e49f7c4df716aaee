"""Which gradients travel in which dtype (``reduce_dtype``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._compat import MixedPrecision
from tritonddp.bucket import Bucket

# What the constructor's ``reduce_dtype`` may be.
REDUCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Wire:
    """How gradients travel.

    Attributes:
        reduce_dtype: the dtype of all dense real ones, fp64 too; ``None`` if each travels in its
            own. Complex and sparse gradients always do.
    """

    reduce_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, reduce_dtype: Any, mixed_precision: MixedPrecision | None) -> Wire:
        """The constructor's arguments, of which ``mixed_precision`` has been looked at already.

        Raises:
            TypeError: ``reduce_dtype`` is no dtype.
            ValueError: gradients cannot be reduced in it, or the two contradict each other.
        """
        names = ", ".join(map(str, REDUCE_DTYPES))
        if reduce_dtype is not None and not isinstance(reduce_dtype, torch.dtype):
            raise TypeError(f"reduce_dtype should be one of {names}, got {reduce_dtype!r}")
        if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype should be one of {names}, got {reduce_dtype}")
        if mixed_precision is None:
            return cls(reduce_dtype)
        low = mixed_precision.reduce_dtype
        if None not in (low, reduce_dtype) and low != reduce_dtype:
            raise ValueError(
                f"reduce_dtype={reduce_dtype} contradicts mixed_precision, whose reduce_dtype is "
                f"{low}: give one of them"
            )
        return cls(reduce_dtype or low or mixed_precision.param_dtype)

    def casts(self, gradient: Tensor) -> bool:
        """Whether ``gradient``, or that of a parameter, travels in another dtype than its own."""
        dtype = gradient.dtype
        return self.reduce_dtype not in (None, dtype) and dtype.is_floating_point

    def buckets(
        self, bucket_class: Callable[..., Bucket], copying: Callable[..., Bucket]
    ) -> Callable[..., Bucket]:
        """What makes the buckets.

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
