"""Check the constructor's arguments before any collective."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from tritonddp._arguments import check_flags, users_level
from tritonddp._torch import STOCK, serving_device
from tritonddp.buckets.assignment import BucketCaps
from tritonddp.buckets.formats import ExactParams, Int8, WireOptions
from tritonddp.comm.transport import TransportChoice
from tritonddp.compiled.forward import WRAPPER
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.diagnostics.scalars import names_of
from tritonddp.features.check_finite import check_mode
from tritonddp.features.mixed_precision import check_mixed_precision
from tritonddp.kernels.dispatch import GRADIENT_DTYPES, gradient_dtype, select

# Boolean options of the constructor.
FLAGS = (
    "batched_grad_copy",
    "broadcast_buffers",
    "check_reduction",
    "find_unused_parameters",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "init_sync",
    "lazy_bucket_allocation",
    "metrics",
    "skip_all_reduce_unused_params",
    "static_graph",
)
# Arguments that the wrapper exposes, or reads later, as they were given.
_KEPT = (*FLAGS, "check_finite", "dim", "mixed_precision")

_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


@dataclass(frozen=True)
class DDPConfig:
    """The checked arguments of the constructor, in the form that the other classes need."""

    given: Any  # some of the arguments as they were given, as attributes
    wire: WireOptions  # how gradients are sent: dtype or quantization
    caps: BucketCaps
    device_ids: list[int] | None  # None where it has no effect
    output_device: int | None  # None where it has no effect
    divide_factor: float | None  # gradient_divide_factor
    transport: TransportChoice
    syncs_buffers: bool  # whether forwards synchronize buffers
    syncs_initial_buffers: bool  # whether the constructor broadcasts buffers
    options: dict[str, Any]  # options that must match on all ranks, by name

    @classmethod
    def of(
        cls,
        given: Any,
        module: nn.Module,
        params: Sequence[tuple[str, Tensor]],
        group: dist.ProcessGroup,
    ) -> DDPConfig:
        """Check the arguments. Raise the errors of :class:`tritonddp.DistributedDataParallel`.

        ``given`` has the arguments as attributes. ``params`` are the parameters to synchronize.
        """
        arguments: dict[str, Any] = vars(given)
        devices = {param.device for _, param in params}
        check_mode(given.check_finite)
        compression = Int8.of(given.compression)
        transport = TransportChoice.of(given.transport, group, devices, compression)
        check_flags({name: arguments[name] for name in FLAGS})
        divide_factor = divide_factor_of(given.gradient_divide_factor)
        # forward_sync_buffers overrides the deprecated broadcast_buffers.
        former, current = given.broadcast_buffers, given.forward_sync_buffers
        syncs_buffers = former is not False if current is None else bool(current)
        if given.mixed_precision is not None:
            check_mixed_precision(given.mixed_precision)
        exact = None if compression is None else ExactParams(module, compression.exact)
        wire = WireOptions.of(given.reduce_dtype, given.mixed_precision, compression, exact)
        wire.check(group, devices)
        wire_options = wire.description(params)  # calls the user's function, if exact is a function
        check_module(module, params, given.gradient_as_bucket_view, group)
        device_ids, output_device = device_ids_of(given.device_ids, given.output_device, devices)
        delayed = delayed_names(
            given.delay_all_reduce_named_params, given.param_to_hook_all_reduce, params
        )
        device_type = params[0][1].device.type
        # To skip buckets, unused parameters must be in the last ones: the first is always sent.
        keeps_order = not (given.static_graph or given.skip_all_reduce_unused_params)
        caps = BucketCaps.of(
            given.bucket_cap_mb,
            given.bucket_cap_mb_list,
            delayed,
            device_type=device_type,
            few_bytes=bool(compression or (given.reduce_dtype and device_type == "cpu")),
            finds_unused=bool(given.find_unused_parameters and keeps_order),
        )
        sizes = (*caps.limits, "tapering") if caps.tapers else caps.limits
        options: dict[str, Any] = {"bucket sizes": sizes, "transport": given.transport}
        if caps.is_registered:
            options["find_unused_parameters"] = True
        if delayed:
            options["delayed"] = sorted(delayed)
        plain = ("mixed_precision", "reduce_dtype", "check_finite")
        options |= {name: arguments[name] for name in plain if arguments[name] is not None}
        if arguments["metrics"]:
            options["metrics"] = True
        if scalars := names_of(given.scalars):
            options["scalars"] = scalars
        if divide_factor is not None:
            options["gradient_divide_factor"] = divide_factor
        if not syncs_buffers:
            options["forward_sync_buffers"] = False
        return cls(
            SimpleNamespace(**{name: arguments[name] for name in _KEPT}),
            wire,
            caps,
            device_ids,
            output_device,
            divide_factor=divide_factor,
            transport=transport,
            syncs_buffers=syncs_buffers,
            syncs_initial_buffers=syncs_buffers or current is not None,
            options=options | wire_options,
        )


def delayed_names(
    delayed: Any, until: Any, named_params: Sequence[tuple[str, Tensor]]
) -> frozenset[str]:
    """Return the module's names of the parameters whose buckets are sent last.

    ``delayed`` may use other names. No bucket waits for the gradient of ``until``.
    """
    if (delayed is None) != (until is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time."
        )
    if delayed is None:
        return frozenset()
    wanted = [*delayed] if isinstance(delayed, Iterable) else [delayed]
    pairs = [each for each in wanted if isinstance(each, tuple | list) and len(each) == 2]
    if len(pairs) < len(wanted) or not all(isinstance(param, Tensor) for _, param in pairs):
        raise TypeError(
            "delay_all_reduce_named_params should be a list of names and parameters, got "
            f"{delayed!r}"
        )
    if not isinstance(until, Tensor):
        raise TypeError(f"param_to_hook_all_reduce should be a parameter, got {until!r}")
    names: dict[Tensor, str] = {param: name for name, param in named_params}
    strange = [str(name) for name, param in wanted if param not in names]
    if strange:
        raise ValueError(
            "delay_all_reduce_named_params contains parameters that do not belong to the wrapped "
            f"module: {listed(strange)}"
        )
    return frozenset(names[param] for _, param in wanted)


def divide_factor_of(factor: Any) -> float | None:
    """Return ``gradient_divide_factor`` as a float. Raise if gradients cannot be divided by it."""
    if factor is None:
        return None
    if isinstance(factor, bool) or not isinstance(factor, Real):
        raise TypeError(f"gradient_divide_factor should be None or a number, got {factor!r}")
    try:
        divisor = float(factor)
    except OverflowError:
        divisor = math.inf
    if not 0 < divisor < math.inf or math.isinf(1 / divisor):
        raise ValueError(f"gradient_divide_factor should be positive and finite, got {factor!r}")
    return divisor


def sendable(group: Group, device: torch.device, device_ids: Any) -> torch.device:
    """Return a device whose tensors the group can send, even if the module's device is wrong."""
    devices = [torch.device("cpu")]
    if device.type == "cuda":
        devices.insert(0, device)
    elif torch.cuda.is_available():
        given = device_ids[0] if isinstance(device_ids, list) and device_ids else None
        if not isinstance(given, int) or given < 0:
            given = torch.cuda.current_device()
        devices.append(torch.device("cuda", given))
    return serving_device(group.process_group, devices)


def process_group_of(
    process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup:
    """Return the process group to average over. Raise the errors of the constructor."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if not dist.is_available():
        raise RuntimeError("this build of PyTorch lacks torch.distributed")
    if process_group is None and not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group: torch.distributed.init_process_group('gloo') under torchrun, "
            "'nccl' for CUDA"
        )
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(f"device_mesh should be a DeviceMesh, got {device_mesh!r}")
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        process_group = device_mesh.get_group(mesh_dim=0)
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        raise ValueError(
            f"{rank} does not belong to process_group, which is {group!r}: wrap the module only "
            "on the ranks of the group"
        )
    Group(group).refuse_if_forked()
    return group


def check_module(
    module: nn.Module, params: Sequence[tuple[str, Tensor]], views: bool, group: dist.ProcessGroup
) -> None:
    """Raise if this module cannot be wrapped. The errors name the parameters.

    For the arguments see :meth:`DDPConfig.of`.
    """
    if not any(param.requires_grad for _, param in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            f"requires a gradient: {type(module).__name__} has none"
        )
    uninitialized = [name for name, param in params if isinstance(param, UninitializedParameter)]
    if uninitialized:
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules: "
            f"{', '.join(uninitialized)}"
        )
    first = {param.device.type: name for name, param in reversed(params)}
    if len(first) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but "
            f"input module parameters locate in {first} (the first parameter on each): move them "
            "to one device type"
        )
    for device in sorted({param.device for _, param in params}, key=str):
        select(device)  # raises if there are no kernels for it
    for name, param in params:
        if param.requires_grad and gradient_dtype(param) not in GRADIENT_DTYPES:
            raise NotImplementedError(
                f"parameter {name!r} has gradients of dtype {gradient_dtype(param)}; supported "
                f"dtypes: {', '.join(map(str, GRADIENT_DTYPES))}"
            )
    for name, layer in module.named_modules():
        if layer.__dict__.get(WRAPPER) is not None:
            raise ValueError(
                f"{_named(name, layer)} is already replicated in place: wrapping it would average "
                "its gradients twice. Remove the wrapper"
            )
        if isinstance(layer, STOCK) and (views or layer.gradient_as_bucket_view):
            raise ValueError(
                f"{_named(name, layer)} is already wrapped: nested wrappers do not support "
                "gradient_as_bucket_view=True, because .grad cannot be a view of the buckets of "
                "both. Set it to False in both"
            )
        if isinstance(layer, STOCK) and layer.process_group is group:
            warnings.warn(
                f"{_named(name, layer)} is already wrapped by {type(layer).__name__} for the same "
                "ranks: its gradients are sent and averaged twice. Remove one of the wrappers",
                stacklevel=users_level(),
            )
        if isinstance(layer, nn.SyncBatchNorm) and "cpu" in first:
            raise ValueError(
                f"SyncBatchNorm layers only work with GPU modules, and {name or 'the module'!r} "
                "is on the CPU"
            )


def _named(name: str, module: nn.Module) -> str:
    return repr(name) if name else f"the module, a {type(module).__name__},"


def device_ids_of(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    devices: set[torch.device],
) -> tuple[list[int] | None, int | None]:
    """Return the indices of ``device_ids`` and ``output_device``, ``None`` if without effect.

    ``devices`` are the devices of the parameters.
    """
    if device_ids is not None and not isinstance(device_ids, Sequence):
        raise TypeError(f"device_ids should be None or a list with one device, got {device_ids!r}")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, got {list(device_ids)}"
        )
    one_gpu = len(devices) == 1 and next(iter(devices)).type != "cpu"
    if not one_gpu and (device_ids or output_device):  # like stock DDP, accept output_device=0
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
            f"{device_ids}, output_device {output_device}, and module parameters {devices}: omit "
            "both arguments, or move the module to one GPU before wrapping it"
        )
    if not one_gpu or not device_ids:
        return None, None
    ids = [_device_index(device_ids[0])]
    return ids, ids[0] if output_device is None else _device_index(output_device)


def _device_index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def suggesting(constructor: _Constructor) -> _Constructor:
    """Decorator: for an unknown option, raise a TypeError that suggests the correct spelling."""
    known = inspect.signature(constructor).parameters

    @wraps(constructor)
    def construct(*arguments: Any, **options: Any) -> None:
        for name in options.keys() - known.keys():
            if alike := get_close_matches(name, known, 1):
                raise TypeError(f"unknown option {name!r}: did you mean {alike[0]!r}?")
        constructor(*arguments, **options)

    return cast(_Constructor, construct)


def warn_of_deprecated(given: Any) -> None:
    """Warn of arguments that torch has deprecated."""
    if given.broadcast_buffers is not None:
        message = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at "
            "construction."
        )
        if given.forward_sync_buffers is not None:
            message += " It is ignored because forward_sync_buffers is given."
        warnings.warn(message, FutureWarning, stacklevel=users_level())
    if given.check_reduction:
        message = "`check_reduction` is deprecated and has no effect"
        warnings.warn(message, FutureWarning, stacklevel=users_level())
