"""Module buffers: before the forwards for which stock DDP does it, all ranks get those of one rank.

That is rank 0, inside ``join()`` the highest rank that has inputs. For a module that is replicated
in place it is done after each reduced backward instead, so that one rank may run it alone. Buffers
of all dtypes travel in one message. On one host, once the ranks are connected, they go through
memory that the ranks share (:class:`~tritonddp.comm.host.shared_broadcast.SharedBroadcast`), where
unchanged ones cost a comparison. Bytes alone decide whether a buffer has changed: versions do not
count what is written through ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonddp._torch import preserve_version_counters
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.broadcast import Message, StateBroadcast
from tritonddp.comm.host.shared_broadcast import Part, SharedBroadcast, layout_of
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.peers import Peers
from tritonddp.reducer.graph.backward import SyncState

_Named = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class BufferHook:
    """A function of the user that synchronises buffers.

    Attributes:
        function: takes the buffers by name, and may return futures.
        is_after: it runs after the module's forward, not before.
    """

    function: Callable[[dict[str, Tensor]], Any]
    is_after: bool

    def run(self, named: _Named) -> Iterable[torch.futures.Future]:
        """Call it; returns what the end of the next backward waits for."""
        with preserve_version_counters([buffer for _, buffer in named]), torch.no_grad():
            return self.function(dict(named)) or ()


class BufferSync:
    """Synchronises the buffers of one wrapper.

    Args:
        parameters: of the wrapper's module, with the buffers.
        group: the ranks.
        sync: says which rank's buffers all take over.
        counters: of the reductions so far, for errors.
        broadcast: sends buffers through the process group.
        transport: of gradients; with ``"process_group"`` ranks share no memory for buffers either.
    """

    def __init__(
        self,
        parameters: ModuleParameters,
        group: Group,
        sync: SyncState,
        counters: Counters,
        broadcast: StateBroadcast,
        transport: str,
    ) -> None:
        self._parameters, self._group = parameters, group
        self._sync, self._counters = sync, counters
        self._broadcast = broadcast
        is_on_cpu = all(each.is_cpu for _, each in parameters.params)
        self._uses_memory = is_on_cpu and transport != "process_group"
        self._shared: SharedBroadcast | None = None
        # Of the last broadcast: the buffers, their messages, names and kinds; and what follows.
        self._named: _Named = []
        self._messages: list[Message] = []
        self._kinds: list[tuple[str, torch.Size, torch.dtype]] = []
        self._layout, self._nbytes = 1, 0

    def synchronise(self, named: _Named) -> None:
        """Give all ranks the same buffers: those of the wrapper's module.

        Raises:
            RuntimeError: a rank is missing, or has other buffers; the message names it.
        """
        buffers = [buffer for _, buffer in named]
        with preserve_version_counters(buffers):
            if self._sync.join is not None or (shared := self._through_memory()) is None:
                self._send(named)
            else:
                step, source = self._counters.reductions + 1, self._sync.source_rank
                shared.send(self._part(named, buffers), step, source, lambda: self._send(named))

    def _send(self, named: _Named) -> None:
        """Broadcast these buffers through the process group."""
        names, buffers = zip(*named, strict=True)
        where = f"step {self._counters.reductions + 1}, forward"
        self._broadcast.send(buffers, where, f"buffers ({listed(names)})", again=True)

    # Through memory

    def _through_memory(self) -> SharedBroadcast | None:
        """How buffers go through memory; ``None`` if they do not, on all ranks alike.

        The end of a reduced backward connects the ranks, and gives a copied wrapper its number.
        """
        if self._shared is None and self._uses_memory:
            group, number = self._group, self._parameters.number
            if isinstance(group.peers, Peers) and len(group.peers.hosts) == 1 and number >= 0:
                self._shared = SharedBroadcast(group, group.peers, number)
        return self._shared

    def _part(self, named: _Named, buffers: Sequence[Tensor]) -> Part:
        messages = self._broadcast.messages_of(buffers)
        if self._named is not named or self._messages is not messages:
            self._named, self._messages = named, messages
            kinds = [(name, each.shape, each.dtype) for name, each in named]
            if kinds != self._kinds:
                self._kinds, self._layout = kinds, layout_of(kinds)
                self._nbytes = sum(each.nbytes for each in buffers)
        step = self._counters.reductions + 1
        where = f"rank {self._group.rank}, step {step}, forward"
        return Part(messages, self._layout, self._nbytes, named, where)
