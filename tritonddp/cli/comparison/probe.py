"""The parts of a step, its traffic and its kernels: of steps after those that are timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tritonddp import DistributedDataParallel
from tritonddp._torch import logged_times, profiled_collectives, sample_times

_PARTS = ("forward", "backward", "exposed", "communication")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")


class Parts:
    """Seconds of forward, backward, its communication, and what of that nothing covers."""

    def __init__(self) -> None:
        self._models: Sequence[Any] = ()
        self._last: dict[int, int] = {}
        self._steps: list[dict[str, float]] = []

    def begin(self, models: Sequence[Any]) -> None:
        self._models = models
        for model in models:
            sample_times(model, 1)

    def note(self) -> None:
        """At the end of each step: note the times that are known by then."""
        step = dict.fromkeys(_PARTS, 0.0)
        for number, model in enumerate(self._models):
            times = logged_times(model)
            if times is None or self._last.get(number) == times["began"]:
                continue
            self._last[number] = times["began"]
            step["forward"] += times["forward"] / 1e9
            step["backward"] += times["backward"] / 1e9
            step["communication"] += times["communication"] / 1e9
            step["exposed"] += max(0, times["communication"] - times["overlap"]) / 1e9
        if any(step.values()):
            self._steps.append(step)

    def end(self) -> dict[str, Any]:
        for model in self._models:
            sample_times(model, 100)
        self._models = ()
        # The first may still be one that was taken in the first steps of all.
        return {"parts": self._steps[1:]}


class Traffic:
    """Bytes and collectives of a step, through a process group and through memory; kernels."""

    def __init__(self) -> None:
        self._ours: list[Any] = []
        self._before: list[tuple[int, int]] = []
        self._profile: Any = None
        self._device = torch.device("cpu")

    def begin(self, models: Sequence[Any], device: torch.device) -> None:
        self._ours = [model for model in models if isinstance(model, DistributedDataParallel)]
        self._before = [self._through_memory(model) for model in self._ours]
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        try:
            self._profile.start()
        except (RuntimeError, AssertionError):  # the script profiles itself
            self._profile = None

    def end(self, steps: int) -> dict[str, Any]:
        """Means over the steps."""
        now = [self._through_memory(model) for model in self._ours]
        both = list(zip(now, self._before, strict=True))
        nbytes, exchanges = (sum(after[n] - before[n] for after, before in both) for n in (0, 1))
        if self._profile is None:
            return {"traffic": None}
        self._profile.stop()
        found = profiled_collectives(self._profile)
        traffic: dict[str, Any] = {
            "group_bytes": sum(size for _, size in found) / steps,
            "memory_bytes": nbytes / steps,
            "collectives": (len(found) + exchanges) / steps,
        }
        if self._device.type == "cuda":
            launched = sum(event.name in _LAUNCHES for event in self._profile.events())
            traffic["kernels"] = launched / steps
        self._profile = None
        return {"traffic": traffic}

    def _through_memory(self, model: Any) -> tuple[int, int]:
        counters = model.reducer.counters
        return counters.memory_bytes, counters.memory_exchanges
