"""Wire formats: gradients are sent in ``reduce_dtype``, or quantized (``compression``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import compress
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from tritonddp._arguments import check_flags
from tritonddp._torch import MixedPrecision, backend_name, registered_pool
from tritonddp.buckets.bucket import Bucket, Owned
from tritonddp.buckets.exchange import Transport
from tritonddp.buckets.grad_storage.grad_storage import GradStorage
from tritonddp.buckets.grad_storage.sparse_rows import SparseRows
from tritonddp.buckets.grad_storage.views import Views
from tritonddp.buckets.ignored import parameters_of
from tritonddp.buckets.residuals import Left, add_to
from tritonddp.buckets.wire_formats import QuantizedFormat, QuantizedInterHost, WireFormat
from tritonddp.coordination.agreement import Agreement
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.hosts import Hosts
from tritonddp.kernels.dispatch import gradient_dtype, select
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.quantized.code import INT4, INT8, BlockCode

# Allowed values of the constructor's ``reduce_dtype``.
REDUCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Gradient dtypes that can be quantized.
_QUANTIZED = (torch.float32, torch.float16, torch.bfloat16)

# Smaller parameters are not quantized: they save few bytes, and their errors matter more.
_SMALL = 1_024


@dataclass(frozen=True)
class Int8:
    """Send gradients in 8 bits per element and one fp32 scale per 256: for ``compression``.

    ``compression="int8"`` is equivalent to ``compression=Int8()``. Gradients in fp64, complex and
    sparse gradients are sent as without compression. If a block of 256 elements contains a NaN or
    an infinity, the whole block becomes NaN. Parameters of one dimension or of fewer than 1,024
    elements, and weights of embeddings that no other layer shares, are never quantized: they are
    sent in fp32. :meth:`DistributedDataParallel.reduce_gradients` does not quantize either, and
    logs this once.

    If there are several hosts with the same number of ranks each (at least two), the ranks of a
    host first sum, on GPUs in ``reduce_dtype`` if it is given. Then the hosts send each
    other the quantized sums. Otherwise, all ranks send each other quantized gradients.

    Args:
        error_feedback: keep the rounding error of a gradient in fp32, and add it to the next
            one. This takes at most ``4 + 4 / world_size`` bytes per element; with H hosts of G
            ranks each, ``(4 + 4 / H) / G``. Without error feedback, errors accumulate. The errors
            belong in checkpoints: see :meth:`DistributedDataParallel.comm_state_dict`. With
            ``"sums"``, only the error of the second rounding (of the sums) is kept, which takes
            only the second term of these bytes. Two ranks, or two hosts, on CPUs have no second
            rounding.
        exact: additional parameters that are not quantized: a name, several names, patterns
            (``"head.*"``), or a function of name and parameter.

    Raises:
        TypeError: ``error_feedback`` or ``exact`` is not one of these values.

    Example::

        wire = tritonddp.Int8(exact="2.*")  # the last layer, in fp32
        model = tritonddp.DistributedDataParallel(module, compression=wire)
    """

    error_feedback: bool | Literal["sums"] = True
    exact: Any = None
    code: ClassVar[BlockCode] = INT8

    def __post_init__(self) -> None:
        if self.error_feedback != "sums":
            check_flags({"error_feedback": self.error_feedback})
        if self.exact is not None and not callable(self.exact):
            object.__setattr__(self, "exact", _patterns_of(self.exact))

    @classmethod
    def of(cls, compression: Any) -> Int8 | None:
        """Create the format from the constructor's ``compression``.

        Raises:
            ValueError: it is not a format.
        """
        if compression is None or isinstance(compression, cls):
            return compression
        if isinstance(compression, str) and compression in _BY_NAME:
            return _BY_NAME[compression]()
        raise ValueError(
            "compression should be 'int8', 'int4', a tritonddp.Int8, a tritonddp.Int4 or None, got "
            f"{compression!r}"
        )


@dataclass(frozen=True)
class Int4(Int8):
    """Send gradients in 4 bits per element and one fp32 scale per 256: for ``compression``.

    ``compression="int4"`` is equivalent to ``compression=Int4()``. For everything else see
    :class:`Int8`. A gradient is rounded to 15 values, so keep error feedback enabled.

    Example::

        model = tritonddp.DistributedDataParallel(module, compression=tritonddp.Int4())
    """

    code: ClassVar[BlockCode] = INT4


_BY_NAME = {each.code.name: each for each in (Int8, Int4)}


@dataclass(frozen=True)
class WireOptions:
    """The formats in which gradients are sent, as requested by the user.

    Dense real gradients, including fp64, are sent in ``reduce_dtype``; complex and sparse gradients
    in their own dtype. ``compression`` does not apply to fp64, complex and sparse gradients, nor to
    buckets whose gradients are all exact.
    """

    reduce_dtype: torch.dtype | None = None  # None: each gradient in its own dtype
    compression: Int8 | None = None  # None: nothing is quantized
    exact: ExactParams | None = None  # finds the parameters whose gradients are not quantized

    @classmethod
    def of(
        cls,
        reduce_dtype: Any,
        mixed_precision: MixedPrecision | None,
        compression: Int8 | None = None,
        exact: ExactParams | None = None,
    ) -> WireOptions:
        """Create the options from the constructor's arguments.

        The arguments other than dtypes have been checked already.

        Raises:
            TypeError: ``reduce_dtype`` is not a dtype.
            ValueError: gradients cannot be reduced in ``reduce_dtype``, or it contradicts
                ``mixed_precision``.
        """
        names = ", ".join(map(str, REDUCE_DTYPES))
        if reduce_dtype is not None and not any(reduce_dtype is each for each in REDUCE_DTYPES):
            kind = ValueError if isinstance(reduce_dtype, torch.dtype) else TypeError
            raise kind(f"reduce_dtype should be one of {names}, got {reduce_dtype!r}")
        if mixed_precision is not None:
            low = mixed_precision.reduce_dtype
            if None not in (low, reduce_dtype) and low != reduce_dtype:
                raise ValueError(
                    f"reduce_dtype={reduce_dtype} contradicts mixed_precision, whose reduce_dtype "
                    f"is {low}. Pass only one of them"
                )
            reduce_dtype = reduce_dtype or low or mixed_precision.param_dtype
        return cls(reduce_dtype, compression, exact)

    def check(self, group: dist.ProcessGroup, devices: Iterable[torch.device]) -> None:
        """Raise if gradients on these devices cannot be sent in this format.

        Raises:
            RuntimeError: the backend of a device cannot send quantized gradients.
        """
        if self.compression is None or group.size() == 1:
            return
        for device in sorted(set(devices), key=str):
            wanted = "gloo" if device.type == "cpu" else "nccl"
            backend = backend_name(group, device)
            if backend != wanted:
                raise RuntimeError(
                    f"compression requires the {wanted} backend for {device.type!r}, but the "
                    f"process group uses {backend}. Use a group with {wanted}, or disable "
                    "compression"
                )

    def description(self, params: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        """Return the options that must match on all ranks, resolved for these parameters."""
        if self.compression is None or self.exact is None:
            return {}
        names = [name for name, _ in params]
        found = self.exact.find(names, [param for _, param in params])
        return {
            "compression": self.compression.code.name,
            "error_feedback": self.compression.error_feedback or False,
            "exact": list(compress(names, found)),
        }

    def casts(self, gradient: Tensor) -> bool:
        """Return True if a gradient is sent in another dtype; ``gradient`` may be its parameter."""
        dtype = gradient_dtype(gradient)
        return self.reduce_dtype not in (None, dtype) and dtype.is_floating_point


@dataclass
class BucketFactory:
    """Creates buckets, and chooses the wire format of each."""

    wire: WireOptions
    group: Group  # with one rank nothing is quantized
    agreement: Agreement  # knows how many bytes a header has
    counters: Counters  # count launches of the buckets
    transport: Transport  # creates the exchanges of the buckets
    views: bool = False  # .grad are bucket views, if gradients are sent in their own dtype
    lazy: bool = False  # buckets have memory during backwards only
    check_finite: bool = False  # buckets have room to report gradients that are not finite
    is_registered: bool = False  # dense gradients are in memory that the backend has registered
    # Hosts, if several hosts have several ranks each, which sum within the host first; else None.
    hosts: Hosts | None = None
    # The rank to which a gradient is reduced, by parameter. Other gradients go to all ranks.
    owners: Mapping[Tensor, int] = field(default_factory=dict)
    # Residuals (quantization errors) of buckets that are being replaced.
    kept: dict[Tensor, list[Left]] = field(default_factory=dict, init=False)
    # Allocators of registered memory. A pool takes 20 MiB for its first MiB: one serves all
    # buckets.
    allocators: dict[torch.device, Callable[[int], Tensor]] = field(
        default_factory=dict, init=False
    )

    def temporary(self, transport: Transport, views: bool = False) -> BucketFactory:
        """Return a factory of buckets for one reduction by ``transport``, without quantization."""
        wire = replace(self.wire, compression=None)
        factory = replace(self, wire=wire, transport=transport, views=views, lazy=False)
        # A rank that runs a different reduction is detected by the header in the first bucket. So
        # that bucket is sent in the same way, unless gradients were passed by the user.
        return replace(factory, is_registered=False, owners={}, hosts=None)

    def reduce_by(self, transport: Transport) -> None:
        """Reduce buckets that are made from now on with ``transport``."""
        self.transport = transport

    def use_hosts(self, hosts: Hosts | None) -> None:
        """Make buckets from now on for these hosts with several ranks each, if any."""
        self.hosts = hosts

    def own(self, owners: Mapping[Tensor, int]) -> None:
        """Reduce buckets that are made from now on to these ranks."""
        self.owners = owners

    def keep(self, residuals: dict[Tensor, list[Left]]) -> None:
        """Give these residuals of replaced buckets to the buckets that are made next."""
        self.kept = residuals

    def make(
        self,
        index: int,
        params: Sequence[Parameter],
        names: Sequence[str],
        is_sparse: bool = False,
    ) -> Bucket:
        """Create bucket ``index`` for these parameters, with gradients of one dtype and device.

        The first bucket holds the headers. ``is_sparse`` is true for a parameter with sparse
        gradients.
        """
        device, dtype = params[0].device, gradient_dtype(params[0])
        headers = self.agreement.size * self.group.size if index == 0 else 0
        checked = (self.group.rank, self.group.size) if self.check_finite else None
        kernels = select(device, dtype)
        if is_sparse:
            kernels = replace(kernels, joint_unflatten=None)
            rows = SparseRows(params[0], self.group.rank, self.group.size)
            args = (index, params, names, rows, kernels, self.counters, headers)
            return Bucket(*args, checked=checked)
        wire = self._wire_format(params, names, headers)
        storage = GradStorage(len(params))
        if self.views and wire.inter_host is dtype:
            storage = Views(len(params))
        kernels = wire.kernels(kernels, device)
        if self.is_registered:
            kernels = replace(kernels, buffer=partial(self._registered_buffer, kernels.buffer))
        bucket = Bucket(
            index,
            params,
            names,
            storage,
            kernels,
            self.counters,
            headers=headers,
            wire=wire,
            lazy=self.lazy,
            owned=self._owned(params),
            checked=checked,
        )
        for slot, param in enumerate(bucket.params):
            for left in self.kept.pop(param, ()):
                add_to(bucket, slot, left)
        return bucket

    def _owned(self, params: Sequence[Parameter]) -> Owned | None:
        """Return which of these parameters each rank owns; ``None`` if they have no owners."""
        if params[0] not in self.owners:
            return None
        ranks = [self.owners[param] for param in params]
        ranges, first = [], 0
        for rank in range(self.group.size):
            ranges.append(range(first, first + ranks.count(rank)))
            first = ranges[-1].stop
        return Owned(tuple(ranges), ranges[self.group.rank])

    def _registered_buffer(
        self, make: Callable[..., FlatBuffer], layout: Layout, dtype: torch.dtype, device: Any
    ) -> FlatBuffer:
        """Create a buffer with ``make`` in registered memory."""
        if device not in self.allocators:
            self.allocators[device] = registering(self.group.process_group, device)
        memory = self.allocators[device](layout.numel * dtype.itemsize)
        return make(layout, dtype, device, memory.zero_())

    def _wire_format(
        self, params: Sequence[Parameter], names: Sequence[str], headers: int
    ) -> WireFormat:
        """Return the wire format of a bucket with these parameters."""
        wire, group, exact = self.wire, self.group, self.wire.exact
        param, device = params[0], params[0].device
        own = gradient_dtype(param)
        hosts = None if self.lazy or param in self.owners else self.hosts
        if wire.compression is not None and group.size > 1 and exact is not None:
            quantized = [not each for each in exact.find(names, params)]
            if own in _QUANTIZED and any(quantized):
                how = (wire.compression.code, wire.compression.error_feedback)
                if hosts is not None:
                    # Within a host, NCCL sends all bytes, too; shared memory of CPUs sends none.
                    low = wire.reduce_dtype if param.is_cuda else None
                    return QuantizedInterHost(quantized, hosts, low or torch.float32, *how)
                numels = [each.numel() for each in params]
                ranks = (group.size, group.rank)
                return QuantizedFormat(numels, quantized, *ranks, headers, device, *how)
        if not wire.casts(param):
            return WireFormat(own)
        if hosts is None or param.is_cuda:  # GPUs use two levels for quantized gradients only
            return WireFormat(wire.reduce_dtype or own)
        return WireFormat(torch.promote_types(own, torch.float32), wire.reduce_dtype)


def registered_memory(
    group: dist.ProcessGroup, device: torch.device
) -> Callable[[int], Tensor] | None:
    """Return the function of :func:`registering`; ``None`` if registered memory is unavailable.

    All ranks must allocate the same sizes in the same order.
    """
    pool = registered_pool(group, device)
    if pool is None:
        return None

    def allocate(nbytes: int) -> Tensor:
        with torch.cuda.use_mem_pool(pool, device):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    return allocate


def registering(group: dist.ProcessGroup, device: torch.device) -> Callable[[int], Tensor]:
    """Return a function that allocates n bytes that ``group`` has registered, uint8 ``(n,)``.

    Raises:
        ValueError: registered memory is not available.
    """
    allocate = registered_memory(group, device)
    if allocate is None:
        raise ValueError(
            "transport='registered_memory' requires torch 2.9, NCCL, and GPUs with memory "
            "registration (NVLink with multicast), but the process group uses "
            f"{backend_name(group, device)} for {str(device)!r} and cannot allocate registered "
            f"memory (torch {torch.__version__}). Use 'auto'"
        )
    return allocate


class ExactParams:
    """Finds the exact parameters of a module: their gradients are sent in fp32, not quantized.

    These are: parameters with one dimension (biases, scales of norms), those with fewer than 1,024
    elements, the weights of embeddings, whose gradients have many zero rows (unless another layer,
    such as a head, shares the weight, so that all rows get gradients), and those that ``wanted``
    selects.

    ``wanted`` are names, as ``module.named_parameters()`` gives them, or patterns of names
    (:mod:`fnmatch`), or a function ``wanted(name, parameter)`` that returns True for exact
    parameters.

    Raises:
        ValueError: a given name or pattern matches no parameter.
    """

    def __init__(self, module: nn.Module, wanted: Any = None) -> None:
        self._module = module
        self._asks: Callable[[str, Tensor], Any] | None = wanted if callable(wanted) else None
        self._patterns: tuple[str, ...] = () if callable(wanted) else wanted or ()
        names = [name for name, _ in parameters_of(module)] if self._patterns else []
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"exact: no parameter of the module matches {pattern!r}. Pass names from "
                    f"named_parameters() (for example {(names or ['none'])[0]!r}), or patterns"
                )

    def find(self, names: Sequence[str], params: Sequence[Tensor]) -> list[bool]:
        """Return for each of these parameters whether its gradient is exact."""
        embeddings: set[Tensor] = set()
        others: set[Tensor] = set()
        for layer in self._module.modules():
            is_embedding = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
            (embeddings if is_embedding else others).update(layer.parameters(recurse=False))
        embeddings -= others
        return [
            param.dim() < 2
            or param.numel() < _SMALL
            or param in embeddings
            or any(fnmatchcase(name, pattern) for pattern in self._patterns)
            or (self._asks is not None and bool(self._asks(name, param)))
            for name, param in zip(names, params, strict=True)
        ]


def _patterns_of(wanted: Any) -> tuple[str, ...]:
    if isinstance(wanted, str):
        return (wanted,)
    if isinstance(wanted, Iterable) and not isinstance(wanted, bytes | Tensor):
        patterns = tuple(wanted)
        if all(isinstance(pattern, str) for pattern in patterns):
            return patterns
    raise TypeError(
        "exact should be a name, a pattern, a sequence of these, or a function of name and "
        f"parameter, got {wanted!r}"
    )
