"""The data of ``_get_ddp_logging_data()``, under the names of stock DDP."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tritonddp._device import Moments, is_capturing
from tritonddp._torch import CPP_NAMES, gloo_threads
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.group import group_backend
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_ENVIRONMENT_OF = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}

# As in stock DDP: time the first 10 steps, then one in 100 unless another rate is set.
FIRST = 10
RATE = 100

# As in stock DDP: the time between them, mainly the loss, counts as backward.
FORWARD_BEGAN, FORWARD_ENDED = "forward began", "forward ended"
COMPUTE_ENDED = "compute ended"
COMMUNICATION_BEGAN, COMMUNICATION_ENDED = "communication began", "communication ended"

_TIMES = [
    ("forward_compute_time", FORWARD_BEGAN, FORWARD_ENDED),
    ("backward_compute_time", FORWARD_ENDED, COMPUTE_ENDED),
    ("backward_comm_time", COMMUNICATION_BEGAN, COMMUNICATION_ENDED),
    ("backward_compute_comm_overlap_time", COMMUNICATION_BEGAN, COMPUTE_ENDED),
]
_STAMPS = [
    ("forward_compute_time_start", FORWARD_BEGAN),
    ("backward_compute_time_start", FORWARD_ENDED),
    ("backward_compute_time_end", COMPUTE_ENDED),
    ("backward_comm_time_start", COMMUNICATION_BEGAN),
    ("backward_comm_time_end", COMMUNICATION_ENDED),
]


class Logger(Extension):
    """The configuration and statistics of a wrapper, which this object does not keep alive.

    Values are read on demand, except the initial buckets, the last error and the times of sampled
    steps, which are stored.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        state = wrapper._ddp_state
        device = None if wrapper.is_multi_device_module else state.device
        self.sampler = Sampler(state.core, device)
        self._noted = {"bucket_sizes": _join(map(_nbytes, _buckets(wrapper)))}
        self._joins = False  # join() was entered

    def note_join(self) -> None:
        """Record that ``join()`` was entered."""
        self._joins = True

    def set_error_and_log(self, message: str) -> None:
        self._noted["error"] = message
        self.sampler.note_error()

    def on_error(self, message: str) -> None:
        self.set_error_and_log(message)

    def set_runtime_stats_and_log(self) -> None:
        """Start a step, when a forward begins whose backward will be reduced."""
        self.sampler.iteration += 1
        self.sampler.forward_begins()

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Return the current fields: ``strs_map`` has strings, ``ints_map`` has integers."""
        wrapper = self._wrapper()
        assert wrapper is not None, "the wrapper was deleted"
        driver = wrapper._ddp_state.core
        trainable, current = driver.parameters.trainable, driver.manager.current
        last = driver.last
        params = [param for _, param in trainable]
        group, cpu = wrapper.process_group, torch.device("cpu")
        backend = group_backend(group)
        threads = gloo_threads(group, cpu) if backend == "gloo" else None
        ints: dict[str, int | None] = {
            "rank": wrapper.process_group.rank(),
            "world_size": wrapper.process_group.size(),
            "iteration": self.sampler.measured,
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": _nbytes(params),
            "unused_parameter_size": _nbytes(current.params[n] for n in driver.use.missing or ()),
            "num_buckets_reduced": len(last.pending) - len(last.skipped) if last else 0,
            "bucket_cap_bytes": max(wrapper._ddp_state.config.caps.limits),
            "has_rebuilt_buckets": _has_rebuilt(wrapper),
            "has_error": "error" in self._noted or None,
            "has_sync_bn": any(isinstance(m, nn.SyncBatchNorm) for m in wrapper.module.modules()),
            "find_unused_parameters": bool(wrapper.find_unused_parameters),
            "gradient_as_bucket_view": wrapper.gradient_as_bucket_view,
            "broadcast_buffers": wrapper.forward_sync_buffers,
            "is_multi_device_module": wrapper.is_multi_device_module,
            "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
            "static_graph": wrapper.static_graph or None,
            "join_uneven_inputs": self._joins or None,
            "gloo_num_threads": threads,
            **self.sampler.times,
        }
        strs = {
            "module_name": type(wrapper.module).__name__,
            "device_ids": _join(wrapper.device_ids or ()),
            "dtypes": _join(sorted({CPP_NAMES.get(p.dtype, str(p.dtype)) for p in params})),
            "backend_name": backend,
            "comm_hook": _comm_hook(wrapper),
            **self._noted,
        }
        for name in (*_ENVIRONMENT, *_ENVIRONMENT_OF.get(backend, ())):
            # torch reads some of NCCL's variables under names with the prefix TORCH_.
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
            index_of[named[name]] for name in driver.manager.ready_order if name in named
        )
        return SimpleNamespace(
            strs_map={name: text for name, text in strs.items() if text or name == "device_ids"},
            ints_map={name: int(number) for name, number in ints.items() if number is not None},
        )


class Sampler(Extension):
    """Times the parts of sampled steps of one driver.

    It is installed as an extension during a sampled step, and removed in the next step. A single
    rank does not communicate, and needs no buckets for it.
    """

    def __init__(self, driver: AutogradDriver, device: torch.device | None) -> None:
        self._driver = weakref.ref(driver)
        self._device = device  # None if parameters are on several devices: nothing is timed
        self.rate = RATE  # after the first ten steps, one in `rate` is timed
        self.iteration = 0  # steps begun: forwards whose backward will be reduced
        self.next_sample = 0  # no earlier step is timed
        self.moments: Moments | None = None  # time stamps of the sampled step, if any
        self._sampled = 0  # step of these time stamps
        self._is_of = False  # whether the running reduction is the sampled one
        self.measured = 0  # last step with known times
        self.times: dict[str, int] = {}  # times of that step in ns, and means, by stock's names
        self._recorded = 0
        self._communication = None if driver.group.is_alone else _Communication(weakref.ref(self))

    def set_rate(self, rate: int) -> None:
        """After the first ten steps, time one step in ``rate``."""
        self.rate, self.next_sample = rate, 0

    def note_error(self) -> None:
        """Count a failed step as the last known step."""
        self.measured = self.iteration

    def forward_begins(self) -> None:
        """Begin a step that may be sampled. Read the times of the last sample first."""
        if self._device is not None and self._device.type == "cuda" and is_capturing():
            self._drop()
            return
        if self.moments is not None:
            self._close(self.moments)
        if self.iteration > FIRST and self.iteration % self.rate:
            self.next_sample = self.iteration + self.rate - self.iteration % self.rate
            return
        driver = self._driver()
        if driver is not None and self._device is not None and self.moments is None:
            self._sampled, self._is_of = self.iteration, False
            self.moments = Moments(self._device)
            self.moments.mark(FORWARD_BEGAN)
            driver.events.install(self)
            if self._communication is not None:
                driver.events.install(self._communication)

    def forward_ended(self) -> None:
        """Record that the module has returned its output."""
        if self.moments is not None and FORWARD_ENDED not in self.moments:
            self.moments.mark(FORWARD_ENDED)

    def on_begin(self, backward: Backward) -> None:
        """Assign the first reduced backward to the sampled step."""
        assert self.moments is not None
        self._is_of = backward.reduction is not None and COMPUTE_ENDED not in self.moments

    def on_compute_end(self, backward: Backward) -> None:
        self.mark(COMPUTE_ENDED)
        if self._communication is None:
            self.mark(COMMUNICATION_BEGAN, COMMUNICATION_ENDED)

    def mark(self, *names: str) -> None:
        """Record the time of an event of the sampled step."""
        if self._is_of and self.moments is not None:
            for name in names:
                self.moments.mark(name)

    def _close(self, moments: Moments) -> None:
        """End the sampled step: read its times if they are known already."""
        if FORWARD_ENDED in moments and COMMUNICATION_ENDED in moments:
            if not moments.have_passed():
                return  # try again in the next step
            self.measured = self._sampled
            self._recorded += 1
            for field, start, end in _TIMES:
                time, mean = moments.nanoseconds(start, end), f"avg_{field}"
                total = self.times.get(mean, 0) * (self._recorded - 1) + time
                self.times |= {field: time, mean: total // self._recorded}
            for field, moment in _STAMPS:
                self.times[field] = moments.host(moment)
        self._drop()

    def _drop(self) -> None:
        self.moments = None
        driver = self._driver()
        if driver is not None:
            driver.events.remove(self)
            if self._communication is not None:
                driver.events.remove(self._communication)


class _Communication(Extension):
    """The part of a :class:`Sampler` that needs buckets. ``sampler`` is a weak reference to it."""

    def __init__(self, sampler: Callable[[], Sampler | None]) -> None:
        self._sampler = sampler

    def on_launch(self, reduction: Reduction, bucket: Bucket) -> None:
        """Begin communication at the launch of the first bucket."""
        if bucket.index == 0:
            self._mark(COMMUNICATION_BEGAN)

    def _mark(self, name: str) -> None:
        if (sampler := self._sampler()) is not None:
            sampler.mark(name)

    def on_reduced(self, reduction: Reduction, bucket: Bucket) -> None:
        """End communication with the last reduced bucket: each bucket overwrites the time."""
        self._mark(COMMUNICATION_ENDED)


def _buckets(wrapper: Any) -> list[Sequence[Tensor]]:
    return [bucket.params for bucket in wrapper._ddp_state.core.manager.current.buckets]


def _has_rebuilt(wrapper: Any) -> bool:
    """Return whether buckets follow the order in which gradients became ready.

    With ``find_unused_parameters=True``, for which stock DDP never rebuilds, return True only if a
    parameter moved.
    """
    manager = wrapper._ddp_state.core.manager
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return manager.has_moved
    return not manager.is_provisional


def _comm_hook(wrapper: Any) -> str:
    """Return the name of the communication hook, empty without one."""
    if wrapper._ddp_state.builtin_hook is not None:
        return str(wrapper._ddp_state.builtin_hook)
    return _join(getattr(hook, "__qualname__", repr(hook)) for hook, _ in wrapper._comm_hooks)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _join(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
