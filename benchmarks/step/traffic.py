"""What one backward sends and launches, counted in untimed steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.profiler import ProfilerActivity, profile

from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Batch, loss
from tritonddp.coordination.counters import Counters


@dataclass(frozen=True)
class Traffic:
    """Counts of one backward on this rank, buckets being what they are to stay.

    Attributes:
        wire_bytes: handed to collectives: gradients, and whatever tells who used what.
        sent_bytes: what of them this rank has to send, see
        :class:`tritonddp.coordination.counters.Counters`.
        collectives: as the process group counts them.
        launches: kernels, copies and fills on the device, those of the model's own backward
            included; ``None`` on the CPU, or where the profiler cannot look into the device.
    """

    wire_bytes: int
    sent_bytes: int
    collectives: int
    launches: int | None

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, ranks: Ranks) -> Traffic:
        """Run two backwards; collective. The first is to be at least the model's third."""
        before, collectives = _counted(model), _sequence_number()
        _step(model, batch, ranks)
        after = _counted(model)
        collectives = _sequence_number() - collectives
        if type(model) is StockDDP:
            for nbytes in filter(None, (*bucket_bytes(model), _bitmap_bytes(model))):
                after.collective(nbytes, ranks.world_size, passes=2)
        return cls(
            after.wire_bytes - before.wire_bytes,
            after.sent_bytes - before.sent_bytes,
            collectives,
            _launches(model, batch, ranks),
        )


def bucket_bytes(model: nn.Module) -> list[int]:
    """Sizes of the bucket buffers, trailers included."""
    if type(model) is StockDDP:  # tritonddp passes for a subclass of it
        # Private, but the only place where stock tells.
        logged = model._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
        return [int(size) for size in sizes.split(",")]
    if isinstance(model, StockDDP):
        return [bucket.nbytes for bucket in model.reducer.buckets]
    return [0]


def _bitmap_bytes(model: StockDDP) -> int:
    """Stock's further all-reduce, which tells what was used: an int32 for each parameter."""
    if not model.find_unused_parameters:
        return 0
    return 4 * sum(param.requires_grad for param in model.parameters())


def _counted(model: nn.Module) -> Counters:
    """tritonddp's own count so far; what others send is known by their buckets alone."""
    counters = getattr(getattr(model, "reducer", None), "counters", None)
    return Counters() if counters is None else copy.copy(counters)


def _step(model: nn.Module, batch: Batch, ranks: Ranks) -> None:
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()
    ranks.synchronize()


def _launches(model: nn.Module, batch: Batch, ranks: Ranks) -> int | None:
    if ranks.device.type != "cuda":
        return None
    model.zero_grad(set_to_none=True)
    value = loss(model, batch)
    ranks.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        value.backward()
        ranks.synchronize()
    # (NCCL's annotations show up on the device's track too, but launch nothing.)
    return (
        sum(
            event.device_type == DeviceType.CUDA and not event.is_user_annotation
            for event in profiler.events()
        )
        or None
    )


def _sequence_number() -> int:
    """Collectives of the default group so far, whoever called them, C++ included.

    The private name is the only one; the flight recorder logs the same number.
    """
    group: Any = dist.group.WORLD
    return group._get_sequence_number_for_group()
