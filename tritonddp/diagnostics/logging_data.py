"""What ``_get_ddp_logging_data()`` tells, under stock's names."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tritonddp._torch import gloo_threads, group_backend
from tritonddp.diagnostics.sampling import Sampler

# Names that stock has from C++.
_DTYPES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_ENVIRONMENT_OF = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        *("NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING"),
        *("NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
    ),
}


@dataclass(frozen=True)
class LoggingData:
    """Fields that are texts, and fields that are whole numbers."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class Logger:
    """Tells of a wrapper, to which it refers weakly, how it was made and how it is doing.

    All is looked up when it is asked for, but for the buckets that there were at first, the last
    error, and the times of sampled steps.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        device = None if wrapper.is_multi_device_module else wrapper.device
        self.sampler = Sampler(wrapper.core, device)
        self._noted = {"bucket_sizes": _join(map(_nbytes, _buckets(wrapper)))}
        self.joins = False  # join() was entered
        self._has_error = False

    def set_error_and_log(self, message: str) -> None:
        self._has_error = True
        self._noted["error"] = message
        self.sampler.measured = self.sampler.iteration

    def set_runtime_stats_and_log(self) -> None:
        """A forward begins whose backward is to be reduced."""
        self.sampler.iteration += 1
        self.sampler.forward_begins()

    def _get_ddp_logging_data(self) -> LoggingData:
        """What is known now."""
        wrapper = self._wrapper()
        assert wrapper is not None, "the wrapper is gone"
        reducer = wrapper.core
        trainable, current = reducer.parameters.trainable, reducer.manager.current
        params = [param for _, param in trainable]
        backend = group_backend(wrapper.process_group)
        ints: dict[str, int | None] = {
            "rank": wrapper.process_group.rank(),
            "world_size": wrapper.process_group.size(),
            "iteration": self.sampler.measured,
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": _nbytes(params),
            "unused_parameter_size": _nbytes(current.params[n] for n in reducer.missing or ()),
            "num_buckets_reduced": reducer.buckets_reduced,
            "bucket_cap_bytes": wrapper.bucket_bytes_cap,
            "has_rebuilt_buckets": _has_rebuilt(wrapper),
            "has_error": self._has_error or None,
            "has_sync_bn": any(isinstance(m, nn.SyncBatchNorm) for m in wrapper.module.modules()),
            "find_unused_parameters": bool(wrapper.find_unused_parameters),
            "gradient_as_bucket_view": wrapper.gradient_as_bucket_view,
            "broadcast_buffers": wrapper.forward_sync_buffers,
            "is_multi_device_module": wrapper.is_multi_device_module,
            "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
            "static_graph": wrapper.static_graph or None,
            "join_uneven_inputs": self.joins or None,
            "gloo_num_threads": gloo_threads(wrapper.process_group) if backend == "gloo" else None,
            **self.sampler.times,
        }
        strs = {
            "module_name": type(wrapper.module).__name__,
            "device_ids": _join(wrapper.device_ids or ()),
            "dtypes": _join(sorted({_DTYPES.get(p.dtype, str(p.dtype)) for p in params})),
            "backend_name": backend,
            "comm_hook": wrapper.comm_hook_name,
            **self._noted,
        }
        for name in (*_ENVIRONMENT, *_ENVIRONMENT_OF.get(backend, ())):
            # torch has given a prefix to those of NCCL's that it reads itself.
            value = os.environ.get(name, "N/A")
            strs[name.lower()] = os.environ.get(f"TORCH_{name}", value)
        index_of: dict[Tensor, str] = {param: str(index) for index, param in enumerate(params)}
        if _has_rebuilt(wrapper):
            buckets = _buckets(wrapper)
            strs["rebuilt_bucket_sizes"] = _join(map(_nbytes, buckets))
            strs["rebuilt_per_bucket_param_indices"] = _join(
                " ".join(index_of[param] for param in bucket if param in index_of)
                for bucket in buckets
            )
        named = dict(trainable)
        strs["prev_iteration_grad_ready_order_indices"] = _join(
            index_of[named[name]] for name in reducer.manager.ready_order if name in named
        )
        return LoggingData(
            {name: text for name, text in strs.items() if text or name == "device_ids"},
            {name: int(number) for name, number in ints.items() if number is not None},
        )


def _buckets(wrapper: Any) -> list[Sequence[Tensor]]:
    return [bucket.params for bucket in wrapper.core.manager.current.buckets]


def _has_rebuilt(wrapper: Any) -> bool:
    """Whether buckets follow the order of gradients.

    With ``find_unused_parameters=True``, where stock never rebuilds, only if that has moved any.
    """
    manager = wrapper.core.manager
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return manager.has_moved
    return not manager.is_provisional


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _join(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
