"""The bytes, launches and exposed time of one backward, in untimed steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.profiler import ProfilerActivity, profile

from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Batch, backward, loss
from tritonddp.coordination.counters import Counters


@dataclass(frozen=True)
class Traffic:
    """Counts of one backward on this rank, with the final buckets.

    Attributes:
        wire_bytes: bytes passed to collectives: gradients, and information about used parameters.
            ``None`` if nothing counts them, as in FSDP2.
        sent_bytes: bytes of these that this rank has to send, see
            :class:`tritonddp.coordination.counters.Counters`.
        collectives: number that the process group counts.
        launches: kernels, copies and fills on the device, including the model's own backward;
            ``None`` on the CPU, where the profiler does not see the device, or if not requested.
    """

    wire_bytes: int | None
    sent_bytes: int | None
    collectives: int
    launches: int | None

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, ranks: Ranks, with_launches: bool) -> Traffic:
        """Run two backwards; collective. The first must be at least the third of the model."""
        collectives = _sequence_number()
        sent = sent_in(lambda: _step(model, batch, ranks), model, ranks.world_size)
        collectives = _sequence_number() - collectives
        launches = _launches(model, batch, ranks) if with_launches else None
        if isinstance(model, FSDPModule):
            return cls(None, None, collectives, launches)
        return cls(*sent, collectives, launches)


def sent_in(step: Callable[[], object], model: nn.Module, world_size: int) -> tuple[int, int]:
    """Return ``wire_bytes`` and ``sent_bytes`` of a step of the model, see :class:`Traffic`."""
    before = _counted(model)
    step()
    after = _counted(model)
    if type(model) is StockDDP:
        for nbytes in filter(None, (*bucket_bytes(model), _bitmap_bytes(model))):
            after.collective(nbytes, world_size, passes=2)
    return after.wire_bytes - before.wire_bytes, after.sent_bytes - before.sent_bytes


def bucket_bytes(model: nn.Module) -> list[int]:
    """Return the sizes of the bucket buffers, including trailers."""
    if type(model) is StockDDP:  # exact, because isinstance() also holds for tritonddp
        # Private, but stock reports it nowhere else.
        logged = model._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
        return [int(size) for size in sizes.split(",")]
    if isinstance(model, StockDDP):
        return [bucket.nbytes for bucket in model.reducer.buckets]
    return [0]


def exposed(model: nn.Module, batch: Batch, ranks: Ranks, steps: int = 3) -> float:
    """Return the median seconds from the last gradient to the end of the backward; collective.

    For the slowest rank, on a GPU. No compute overlaps this time. A user hook on the parameter
    whose gradient is ready last marks its start.
    """
    order: list[Tensor] = []
    params = [param for param in model.parameters() if param.requires_grad]
    handles = [param.register_hook(lambda _, param=param: order.append(param)) for param in params]
    _step(model, batch, ranks)
    for handle in handles:
        handle.remove()
    last, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    handle = order[-1].register_hook(lambda _: last.record())
    seconds = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        value = loss(model, batch)
        ranks.barrier()
        value.backward()
        end.record()
        ranks.synchronize()
        seconds.append(last.elapsed_time(end) / 1e3)
    handle.remove()
    return ranks.slowest({"exposed": [median(seconds)]})["exposed"][0]


def _bitmap_bytes(model: StockDDP) -> int:
    """Return the bytes of stock's all-reduce of used parameters: an int32 for each parameter."""
    if not model.find_unused_parameters:
        return 0
    return 4 * sum(param.requires_grad for param in model.parameters())


def _counted(model: nn.Module) -> Counters:
    """Return tritonddp's counters; for other wrappers, only bucket sizes are known."""
    counters = getattr(getattr(model, "reducer", None), "counters", None)
    return Counters() if counters is None else copy.copy(counters)


def _step(model: nn.Module, batch: Batch, ranks: Ranks) -> None:
    backward(model, batch)
    ranks.synchronize()


def _launches(model: nn.Module, batch: Batch, ranks: Ranks) -> int | None:
    if ranks.device.type != "cuda":
        return None
    model.zero_grad(set_to_none=True)
    return launches(loss(model, batch).backward)


def launches(call: Callable[[], object]) -> int | None:
    """Return the kernels, copies and fills of a call; ``None`` if the device cannot be profiled.

    NCCL's annotations also appear on the device's track, but launch nothing.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    found = (
        event.device_type == DeviceType.CUDA and not event.is_user_annotation
        for event in profiler.events()
    )
    return sum(found) or None


def _sequence_number() -> int:
    """Return the number of collectives of the default group so far, by any caller, including C++.

    There is no public name; the flight recorder logs the same number.
    """
    group: Any = dist.group.WORLD
    return group._get_sequence_number_for_group()
