"""Synchronization of module buffers: all ranks receive the buffers of one rank.

Buffers are synchronized before the same forwards as in stock DDP. The source is rank 0, and inside
``join()`` the highest rank with inputs. The buffers of a module that is replicated in place are
synchronized after each reduced backward instead, so that one rank may run the module alone. Buffers
of all dtypes are sent in one message, or through shared memory of the host, where unchanged buffers
cost a comparison: see :class:`~tritonddp.comm.from_owner.FromOwner`. Their bytes are compared,
because version counters miss writes through ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonddp._torch import current_graph_task_id, graph_is_retained, preserve_version_counters
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.broadcast import StateBroadcast
from tritonddp.comm.from_owner import FromOwner
from tritonddp.comm.transport import TransportChoice
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.reducer.graph.backward import SyncState

_Named = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class BufferHook:
    """A function of the user that synchronizes buffers."""

    function: Callable[[dict[str, Tensor]], Any]  # takes buffers by name, may return futures
    is_after: bool  # it runs after the module's forward, not before it

    def run(self, named: _Named) -> Iterable[torch.futures.Future]:
        """Call the function. Return the futures that the end of the next backward waits for."""
        with preserve_version_counters([buffer for _, buffer in named]), torch.no_grad():
            return self.function(dict(named)) or ()


class BufferSync:
    """Synchronizes the buffers of one wrapper.

    Args:
        parameters: parameters and buffers of the wrapper's module.
        sync: tells the source rank.
        counters: number of reductions so far, for errors.
        broadcast: sends buffers through the process group.

    Attributes:
        for_next_forward: for a module that is replicated in place, if the graph was retained: each
            buffer with its current value and its value for the next forward.
    """

    def __init__(
        self,
        parameters: ModuleParameters,
        group: Group,
        sync: SyncState,
        counters: Counters,
        broadcast: StateBroadcast,
        transport: TransportChoice,
    ) -> None:
        self._parameters, self._group = parameters, group
        self._sync, self._counters = sync, counters
        self._broadcast = broadcast
        self._to_all = FromOwner(group, transport, "buffers")
        self.for_next_forward: list[tuple[Tensor, Tensor, Tensor]] = []

    def synchronize(self, hook: BufferHook | None) -> Iterable[torch.futures.Future]:
        """Synchronize the buffers of the wrapper's module over all ranks, if there are any.

        Use the buffers of one rank, or the result of ``hook``. Return the futures that the end of
        the next backward waits for.

        Raises:
            RuntimeError: a rank is missing, or has other buffers. The message names it.
        """
        named = self._parameters.buffers()
        if not named:
            return ()
        self._group.recover()
        if hook is not None:
            return hook.run(named)
        self._send(named)
        return ()

    def _send(self, named: _Named) -> None:
        buffers = [buffer for _, buffer in named]
        step, source = self._counters.reductions + 1, self._sync.source_rank
        where = f"rank {self._group.rank}, step {step}, forward"
        uses_memory = self._sync.join is None and self._to_all.share_memory(self._parameters.number)
        with preserve_version_counters(buffers):
            self._to_all.send(
                named,
                step,
                source,
                where,
                max_bytes=self._broadcast.max_bytes,
                uses_memory=uses_memory,
            )

    def after_backward(self, hook: BufferHook | None) -> Iterable[torch.futures.Future]:
        """Synchronize buffers after a reduced backward of a module replicated in place.

        A retained graph may have saved buffers for the next backward. They then keep their values
        until the next forward, as with a wrapper.
        """
        self.for_next_forward = []  # an earlier backward through that graph may have left some
        if current_graph_task_id() == -1 or not graph_is_retained():
            return self.synchronize(hook)
        buffers = [each.detach() for _, each in self._parameters.buffers()]
        own = [each.clone() for each in buffers]
        torch.futures.wait_all([*self.synchronize(hook)])  # defer what the futures write, too
        deferred = [each.clone() for each in buffers]
        _overwrite(zip(buffers, own, strict=True))
        self.for_next_forward = list(zip(buffers, own, deferred, strict=True))
        return ()

    def write_deferred(self) -> None:
        """Write the buffers deferred by a retained graph, unless they were written to since."""
        deferred, self.for_next_forward = self.for_next_forward, []
        _overwrite((buffer, new) for buffer, own, new in deferred if torch.equal(buffer, own))


def _overwrite(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first, without a new version for autograd."""
    for tensor, values in pairs:
        with preserve_version_counters([tensor]), torch.no_grad():
            tensor.copy_(values)
