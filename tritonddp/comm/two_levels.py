"""Quantized gradients between hosts with several GPUs each.

The ranks of a host sum in full precision, so each rank has the sum of its *share* of a bucket.
Ranks with the same share on different hosts exchange these sums in quantized messages. Then the
ranks of a host gather the shares. So the traffic of a host does not depend on its number of GPUs,
and a gradient is rounded once per host and once for the sum.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._device import SideStreams
from tritonddp._torch import all_gather_single, reduce_scatter_single
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.residuals import add_unsent
from tritonddp.comm.all_reduce import Collective
from tritonddp.comm.quantized import sum_messages
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.hosts import Hosts, find_hosts, subgroup
from tritonddp.kernels.quantized.messages import ShareMessages


class TwoLevels(Collective):
    """Sums buckets whose wire format is ``QuantizedInterHost``. One object serves all buckets.

    The steps for each bucket::

        reduce-scatter      within the host, fp32
        all-to-all          between hosts, quantized: 1/H of the share to each of H hosts
        all-gather          between hosts, of the quantized sums
        all-gather          within the host, fp32

    The first and the last step use separate groups. In a single group, and thus on a single NCCL
    stream, the first step of the next bucket would wait for the last step of this one, and the link
    between hosts would be idle.
    """

    def __init__(self, hosts: Hosts, groups: HostGroups, counters: Counters) -> None:
        self._hosts, self._groups, self._counters = hosts, groups, counters
        self._streams = SideStreams()
        self._shares: WeakKeyDictionary[Bucket, tuple[Tensor, ShareMessages]] = WeakKeyDictionary()

    def connect(self, bucket: Bucket) -> None:
        """Prepare ``bucket``: create its messages, and everything else that a launch needs."""
        data, hosts = bucket.flat.data, self._hosts
        share = bucket.wire.cut(len(data), len(hosts.ranks[0]))[hosts.local_rank]
        messages = bucket.wire.messages(data, share, hosts)
        assert isinstance(messages, ShareMessages)
        messages.prepare()
        self._shares[bucket] = data[slice(*share)], messages

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Work:
        share, messages = self._shares[bucket]
        flat, data, (scatter, inter, gather) = messages.flat, bucket.flat.data, self._groups
        for nbytes, group in (
            (data.nbytes, scatter),
            (flat.received.nbytes, inter),
            (flat.gathered.nbytes, inter),
            (data.nbytes, gather),
        ):
            self._counters.collective(nbytes, group.size())
        if not is_broken:
            add_unsent(bucket)
        summed = reduce_scatter_single(share, data, scatter)
        memory = (data, *flat.memory, *flat.tables.memory)
        with self._streams.behind_current(data.device, *memory):
            summed.wait()  # the stream waits, not the host
            messages.encode()
            sum_messages(flat, inter).wait()
            messages.decode()
            return all_gather_single(data, share, gather)


class HostGroups(NamedTuple):
    """Process groups of a rank, if several hosts have several GPUs each."""

    scatter: dist.ProcessGroup  # the ranks of its host
    inter: dist.ProcessGroup  # the ranks with the same local rank on each host
    gather: dist.ProcessGroup  # the ranks of its host

    @classmethod
    def of(cls, group: Group, hosts: Hosts, device: torch.device) -> HostGroups:
        """Return the groups for ``group``, created once. All ranks call this at the same time."""
        if group.host_groups is None:
            own = hosts.ranks[hosts.host]
            made = cls(*(subgroup(group, each, device) for each in (own, hosts.partners, own)))
            for each in made:
                # NCCL creates a communicator at the first collective, which would fail in the
                # capture of a CUDA graph.
                dist.all_reduce(torch.zeros(1, device=device), group=each)
            group.keep_host_groups(made)
        found: HostGroups = group.host_groups
        return found


class GpuHosts:
    """Finds the hosts of a group of GPUs, and creates what :class:`TwoLevels` needs.

    See :class:`~tritonddp.buckets.exchange.HostMemory`. Buckets do not move.
    """

    refusal = None

    def __init__(self, group: Group, device: torch.device, counters: Counters) -> None:
        self._group, self._device, self._counters = group, device, counters
        self._exchange: TwoLevels | None = None
        self._hosts: Hosts | None = None
        self._has_looked = False

    def connect(self, where: str) -> Hosts | None:
        """See ``HostMemory``. Looks once per wrapper."""
        if not self._has_looked:
            self._has_looked = True
            hosts = self._hosts = find_hosts(self._group, self._device, where)
            if hosts is not None:
                with self._group.guard(where, "connecting the ranks of a host and other hosts"):
                    groups = HostGroups.of(self._group, hosts, self._device)
                self._exchange = TwoLevels(hosts, groups, self._counters)
        return self._hosts

    def serving(self, bucket: Bucket) -> TwoLevels:
        """Return the exchange, prepared for ``bucket``. Call :meth:`connect` first."""
        assert self._exchange is not None
        self._exchange.connect(bucket)
        return self._exchange

    def begin(self, current: BucketSet) -> None:
        """See ``HostMemory``."""

    def end(self) -> None:
        """See ``HostMemory``."""

    def leave(self) -> None:
        """See ``HostMemory``."""

    def move(self, current: BucketSet, wrapper: int, where: str) -> None:
        """See ``HostMemory``."""
