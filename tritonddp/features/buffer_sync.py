"""Module buffers: before the forwards for which stock DDP does it, all ranks get those of one rank.

That is rank 0, inside ``join()`` the highest rank that has inputs. Buffers of all dtypes travel in
one message. On one host, once the ranks are connected, they go through memory that the ranks share
(:class:`~tritonddp.comm.broadcast.SharedBroadcast`), where unchanged ones cost a comparison. Bytes
alone decide whether a buffer has changed: versions do not count what is written through ``.data``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import preserve_version_counters
from tritonddp.comm.broadcast import (
    Message,
    Part,
    SharedBroadcast,
    StateBroadcast,
    average_coalesced,
    bytes_of,
    is_averaged,
    same_bytes,
)
from tritonddp.comm.peer_memory import Peers
from tritonddp.coordination.failures import listed
from tritonddp.reducer import capture
from tritonddp.reducer.reducer import Reducer

BROADCAST, MEAN, OFF = "broadcast", "mean", "off"
MODES = (BROADCAST, MEAN, OFF)

# Of a buffer on one rank, since the last synchronisation: whether it has changed. UNKNOWN before
# the first one.
_SAME, _CHANGED, _UNKNOWN = range(3)

_Named = Sequence[tuple[str, Tensor]]


class BufferSync:
    """Synchronises the buffers of one wrapper.

    Args:
        core: the reducer of the wrapper.
        broadcast: sends buffers through the process group.
        mode: one of ``MODES``.
        transport: of gradients; with ``"process_group"`` ranks share no memory for buffers either.
    """

    def __init__(self, core: Reducer, broadcast: StateBroadcast, mode: str, transport: str) -> None:
        self._core = core
        self._broadcast = broadcast
        self._averages = mode == MEAN and core.group.size > 1
        is_on_cpu = all(each.is_cpu for _, each in core.parameters.params)
        self._uses_memory = is_on_cpu and transport != "process_group"
        self._shared: SharedBroadcast | None = None
        # Of the last broadcast: the buffers, their messages, names and kinds; and what follows.
        self._named: _Named = []
        self._messages: list[Message] = []
        self._kinds: list[tuple[str, torch.Size, torch.dtype]] = []
        self._layout, self._nbytes = 1, 0
        # For the mean: names, and the bytes of the buffers after the last synchronisation.
        self._after: tuple[list[str], list[Tensor]] = [], []

    def synchronise(self) -> None:
        """Give all ranks the same buffers.

        Raises:
            RuntimeError: a rank is missing, or has other buffers; the message names it.
        """
        core, named = self._core, self._core.parameters.buffers()
        if not named:
            return
        buffers = [buffer for _, buffer in named]
        with preserve_version_counters(buffers):
            if core.sync.join is not None:
                self.reset()  # they may come from a rank that does not have the last means
                self._send(named)
            elif self._averages:
                self._average(named)
            elif (shared := self._through_memory()) is None:
                self._send(named)
            else:
                step, source = core.counters.reductions + 1, core.sync.source_rank
                shared.send(self._part(named, buffers), step, source, lambda: self._send(named))

    def reset(self) -> None:
        """Forget what all ranks had after the last synchronisation."""
        self._after = [], []

    def _send(self, named: _Named) -> None:
        """Broadcast these buffers through the process group."""
        names, buffers = zip(*named, strict=True)
        place = f"step {self._core.counters.reductions + 1}, forward"
        self._broadcast.send(buffers, place, f"buffers ({listed(names)})", again=True)

    # Through memory

    def _through_memory(self) -> SharedBroadcast | None:
        """How buffers go through memory; ``None`` if they do not, on all ranks alike.

        The end of a reduced backward connects the ranks, and gives a copied wrapper its number.
        """
        if self._shared is None and self._uses_memory:
            group, number = self._core.group, self._core.parameters.number
            if isinstance(group.peers, Peers) and len(group.peers.hosts) == 1 and number >= 0:
                self._shared = SharedBroadcast(group, group.peers, number)
        return self._shared

    def _part(self, named: _Named, buffers: Sequence[Tensor]) -> Part:
        messages = self._broadcast.messages_of(buffers)
        if self._named is not named or self._messages is not messages:
            self._named, self._messages = named, messages
            kinds = [(name, each.shape, each.dtype) for name, each in named]
            if kinds != self._kinds:
                digest = hashlib.sha256(repr(kinds).encode()).digest()
                self._kinds, self._layout = kinds, int.from_bytes(digest[:4], "little") or 1
                self._nbytes = sum(each.nbytes for each in buffers)
        step = self._core.counters.reductions + 1
        where = f"rank {self._core.group.rank}, step {step}, forward"
        return Part(messages, self._layout, self._nbytes, named, where)

    # The mean

    @torch.no_grad()
    def _average(self, named: _Named) -> None:
        """Average the floating-point buffers that have changed on any rank, broadcast the others.

        Those that have changed on no rank are alike on all ranks already.
        """
        core = self._core
        capture.refuse(core, "buffer_sync='mean' asks all ranks which buffers have changed")
        names = [name for name, _ in named]
        former = self._after[1] if self._after[0] == names else [None] * len(names)
        now = [bytes_of(each) for _, each in named]
        device = named[0][1].device
        changes = torch.stack([_change(*both).to(device) for both in zip(now, former, strict=True)])
        where = f"rank {core.group.rank}, step {core.counters.reductions + 1}, forward"
        what = f"agreement on which buffers have changed ({listed(names)})"
        core.group.all_reduce(changes, where, what, dist.ReduceOp.MAX)
        means, others = [], []
        for each, change in zip(named, changes.tolist(), strict=True):
            if change == _CHANGED and is_averaged(each[1]):
                means.append(each)
            elif change:
                others.append(each)
        if means:
            tensors = [each for _, each in means]
            what = f"mean of buffers ({listed([name for name, _ in means])})"
            with core.group.guard(where, what):
                average_coalesced(tensors, core.group.process_group)
        if others:
            self._send(others)
        self._after = (
            names,
            [
                bytes_of(each).clone() if change or kept is None else kept
                for (_, each), change, kept in zip(named, changes.tolist(), former, strict=True)
            ],
        )


def _change(now: Tensor, former: Tensor | None) -> Tensor:
    """How the bytes of a buffer have changed: uint8, of no dimension."""
    if former is None or former.shape != now.shape or former.device != now.device:
        return torch.tensor(_UNKNOWN, dtype=torch.uint8, device="cpu")
    if now.is_cpu:
        change = _SAME if same_bytes(now, former) else _CHANGED
        return torch.tensor(change, dtype=torch.uint8, device="cpu")
    return (now != former).any().to(torch.uint8)
