"""The sum over GPUs of one host that read each other's memory over NVLink.

NCCL needs several rounds for an all-reduce of a small bucket. Here each rank packs (flattens) the
bucket into memory that the others have mapped. One kernel on each rank reads the memory of all, and
adds in the order of the ranks, so that all hold the same bits. The sum goes into the bucket's own
buffer, on a side stream, and is unpacked from there like a sum of NCCL::

    pack     current stream   after the barrier that closed the last reduction
    launch   side stream      after the pack: a barrier, the sum
    wait     current stream   after the sum
    last     side stream      after the last sum of a run: a barrier that closes it

A barrier is a kernel of torch, in which the device waits, not the host. If another rank is gone, or
reduces something else, the device waits until the timeout of the group. Then torch's kernel aborts,
and the process cannot use the device any more.

This has not been measured yet. It is for small buckets: each rank reads ``world_size`` buckets,
where a rank of a ring reads two.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from types import NoneType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tritonddp._device import Milestone, SideStreams, uploaded
from tritonddp._torch import (
    nvlinks,
    symmetric_empty,
    symmetric_memory_lack,
    symmetric_rendezvous,
    timeout_of,
)
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import plain
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.coordination.peers import first_failure
from tritonddp.coordination.verify import all_gather_bytes
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import round_up

logger = logging.getLogger("tritonddp.comm.symmetric_memory")

# Bytes of the largest bucket. (Published measurements: one shot wins below 400 KB on 8 H100.)
_LARGEST = 512 * 1024
_ALIGNMENT = 256  # of a bucket within the memory, in bytes
# Bytes of the description that each rank sends of itself.
_INTRODUCTION = 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MISSING_TIMEOUT = 1800.0  # seconds, if the group has no timeout


class Block:
    """The memory in which this rank packs its buckets, and its mapping of the others' memory.

    Attributes:
        memory: uint8; freeing it makes the host wait for the device.
        handle: see :func:`tritonddp._torch.symmetric_rendezvous`.
        timeout: timeout of a barrier in milliseconds.
        streams: has the side stream of all sums.
        closed: reached when all ranks have read the memory for the last reduction.
        indices: indices of the buckets in this memory.
        free: see :class:`SymmetricExchange`.
    """

    free = 0

    def __init__(self, memory: Tensor, handle: Any, timeout: int, streams: SideStreams) -> None:
        self.memory, self.handle = memory, handle
        self.timeout, self.streams = timeout, streams
        self.closed = Milestone(memory.device)
        self.indices: list[int] = []

    def barrier(self) -> None:
        """Barrier on the current stream: later work waits for the earlier work of all ranks."""
        self.handle.barrier(0, self.timeout)

    def addresses(self, offset: int) -> Tensor:
        """Addresses of byte ``offset`` in the memory of each rank: int64 ``(world_size,)``."""
        starts = self.handle.buffer_ptrs
        offset += self.memory.data_ptr() - starts[self.handle.rank]
        return uploaded(torch.tensor([start + offset for start in starts]), self.memory.device)


class SymmetricExchange:
    """The exchanges of one bucket, one after the other; a work object.

    Attributes:
        module: the memory in which the bucket is packed.
        number: more than ``module.free`` if other ranks may still read the packed bucket. The
            stream that packs it next has to wait then; the host does not.
        into_grads: see :class:`Bucket`.
    """

    into_grads = False

    def __init__(self, block: Block, bucket: Bucket, offset: int) -> None:
        self.module, self.number = block, block.free
        device, flat = block.memory.device, bucket.flat
        self._device = device
        kernels = select(device, bucket.params[0].dtype)
        self._reduce = kernels.reduce_unflatten
        # All that the sums use is allocated on their stream, and freed to it.
        with block.streams.behind_current(device, *flat.memory):
            # It needs its own address tables: those of the bucket hold the addresses of .grad.
            memory = flat.data.view(torch.uint8)
            self._summed = kernels.buffer(flat.layout, bucket.wire_dtype, device, memory)
            kernels.tables(self._summed)
            self._addresses = block.addresses(offset)
        self._is_there = Milestone(device)

    def wait_for(self, kind: int) -> None:
        """Make the current stream wait until all ranks have read the last content.

        Args:
            kind: ``READ``; the device waits for all else by itself.
        """
        self.module.closed.wait()
        self.number = self.module.free

    def launch(self, closes: bool) -> None:
        """Sum the bucket over all ranks, after the pack on the current stream.

        ``closes`` is true for the last bucket of a run.
        """
        block = self.module
        self.number = block.free + 1
        with block.streams.behind_current(self._device):
            block.barrier()
            self._reduce(self._summed, self._addresses, self._summed.views)
            self._is_there.record()
            if closes:
                block.barrier()
                block.closed.record()

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        self._is_there.wait()

    def get_future(self) -> torch.futures.Future[None]:
        """See :meth:`Work.get_future`."""
        return self._is_there.get_future()


class SymmetricMemory:
    """Reduces the small buckets of one module over NVLink, if all ranks can.

    Other buckets, and those that are lazy, sparse or quantised, go through the process group.

    Args:
        group: all ranks.
        plain: reduces through the process group.
        counters: count launches and bytes sent.

    Attributes:
        followed: weak reference to the buckets, which refer to this object.
    """

    averages = True

    def __init__(self, group: Group, plain: AllReduce, counters: Counters) -> None:
        self._group, self._plain, self._counters = group, plain, counters
        self._streams = SideStreams(priority=-1)
        self._is_refused = self._is_agreed = False
        self.followed: Callable[[], object] = NoneType

    def launch(self, run: ReductionRun, bucket: Bucket, is_broken: bool = False) -> None:
        """See :meth:`Transport.launch`."""
        exchange = bucket.exchange
        if exchange is None:
            self._plain.launch(run, bucket, is_broken)
            return
        self._counters.collectives += 1
        self._counters.wire_bytes += bucket.nbytes
        self._counters.memory_bytes += bucket.nbytes
        self._counters.memory_exchanges += 1
        if run.is_logged:
            run.log(bucket, "is summed over NVLink" + " with NaN" * is_broken)
        last = max(index for index in exchange.module.indices if index not in run.skipped)
        try:
            with Uninterrupted():
                exchange.launch(closes=bucket.index == last)
                run.works.append(exchange)
        except RuntimeError as error:
            raise run.explain(bucket, error) from error

    def wait(self, run: ReductionRun, bucket: Bucket) -> Tensor | None:
        """See :meth:`Transport.wait`."""
        if bucket.exchange is None:
            return self._plain.wait(run, bucket)
        work = run.works[bucket.index]
        work.wait()
        if run.is_logged:
            run.log(bucket, "is waited for by the device")
        return run.read_trailer(bucket, work)

    # Which buckets

    def begin(self) -> None:
        """A reduction begins before :meth:`follow`: through the process group, as on all ranks."""

    def end(self) -> None:
        """The last reduction has failed on all ranks: nothing to do, since all have closed it."""

    def follow(self, current: BucketSet, where: str) -> bool:
        """Move the small buckets to memory that the other ranks can read.

        All ranks call this, at the same time, when they have new buckets.

        Returns:
            Whether they are moved; if not, an earlier call has raised an error.

        Raises:
            RuntimeError: that is not possible, with the same message on all ranks; or a collective
                failed.
        """
        if self._is_refused:
            return False
        self.followed = ref(current)
        with self._group.guard(where, "agreement to exchange over NVLink"):
            why = self.agree(current.params) or self._share(current.buckets)
        if why:
            self._is_refused = True
            raise RuntimeError(
                f"{where}: gradients cannot go over NVLink: {why}. With transport='auto' they go "
                "through the process group"
            )
        return True

    def agree(self, params: Sequence[Tensor]) -> str:
        """Why the ranks cannot use NVLink; empty if they can. All call this, with one result."""
        if self._is_agreed:
            return ""
        device = params[0].device
        mine = _introduction({param.device for param in params})
        came = all_gather_bytes(json.dumps(mine).encode(), _INTRODUCTION, self._group, device)
        why = _refusal([json.loads(each.rstrip(b"\0")) for each in came])
        self._is_agreed = not why
        return why

    def _share(self, buckets: Sequence[Bucket]) -> str:
        """Allocate and map the memory; returns what failed, the same on all ranks, or ``""``."""
        found = [
            bucket
            for bucket in buckets
            if bucket.nbytes <= _LARGEST
            and not (bucket.is_lazy or bucket.is_sparse or bucket.quantization is not None)
        ]
        if self._group.rank == 0:
            logger.info(
                "%d of %d buckets go over NVLink, those of at most %d bytes; the others through "
                "the process group",
                *(len(found), len(buckets), _LARGEST),
            )
        if not found:
            return ""
        group, device = self._group.process_group, found[0].params[0].device
        *offsets, size = accumulate(
            (round_up(bucket.nbytes, _ALIGNMENT) for bucket in found), initial=0
        )
        failure, memory, handle = "", torch.empty(0, device="cpu"), None
        try:
            memory = symmetric_empty(size, device).zero_()
        except RuntimeError as error:
            failure = f"{size} bytes cannot be allocated: {error}"
        if failure := first_failure(failure, self._group, device):
            return failure
        try:
            handle = symmetric_rendezvous(memory, group)
        except RuntimeError as error:
            failure = f"the memory of the other ranks cannot be mapped: {error}"
        if failure := first_failure(failure, self._group, device):
            return failure
        timeout = timeout_of(group, device)
        seconds = timeout.total_seconds() if timeout else _MISSING_TIMEOUT
        block = Block(memory, handle, int(1000 * seconds), self._streams)
        for bucket, offset in zip(found, offsets, strict=True):
            block.indices.append(bucket.index)
            exchange = SymmetricExchange(block, bucket, offset)
            bucket.share(exchange, memory[offset : offset + bucket.nbytes])
        return ""


def _introduction(devices: set[torch.device]) -> dict[str, Any]:
    """The description of this rank: its host, GPU and NVLinks, or why it cannot take part."""
    if len(devices) > 1:
        return {"why": f"its parameters are on {len(devices)} devices"}
    (device,) = devices
    if lack := symmetric_memory_lack(device):
        return {"why": lack}
    try:
        host, links = _BOOT_ID.read_text().strip(), nvlinks(device)
    except (OSError, RuntimeError, IndexError) as error:
        return {"why": f"its NVLinks cannot be queried: {str(error)[:200]}"}
    return {"host": host, "card": device.index, "links": links}


def _refusal(ranks: Sequence[dict[str, Any]]) -> str:
    """Why these ranks cannot use NVLink, from their descriptions; empty if they can."""
    for rank, each in enumerate(ranks):
        if "why" in each:
            return f"rank {rank}: {plain(each['why'])}"
    for rank, each in enumerate(ranks):
        if each["host"] != ranks[0]["host"]:
            return f"ranks 0 and {rank} are on different hosts"
    for rank, each in enumerate(ranks):
        for other, theirs in enumerate(ranks[:rank]):
            if each["card"] == theirs["card"]:
                return (
                    f"ranks {other} and {rank} both have their parameters on cuda:{each['card']}: "
                    "each rank needs a GPU of its own, and has to see all GPUs: unset "
                    "CUDA_VISIBLE_DEVICES and use device r on rank r"
                )
    for rank, each in enumerate(ranks):
        for other, theirs in enumerate(ranks):
            if rank != other and not (each["links"][theirs["card"] :] or [0])[0]:
                return f"there is no NVLink between the GPUs of ranks {rank} and {other}"
    return ""
