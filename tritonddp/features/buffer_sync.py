"""Module buffers: which forwards synchronise them, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import BufferCommHookLocation, preserve_version_counters
from tritonddp.comm.broadcast import BufferHook, broadcast_coalesced
from tritonddp.coordination.failures import RollCall, listed
from tritonddp.features.join_protocol import Attendance

if TYPE_CHECKING:
    from tritonddp.buckets.parameters import Roster
    from tritonddp.reducer.reducer import Reducer


class SyncsBuffers:
    """The part of ``DistributedDataParallel`` that synchronises module buffers."""

    if TYPE_CHECKING:
        process_group: dist.ProcessGroup
        reducer: Reducer
        forward_sync_buffers: bool
        require_forward_param_sync: bool
        broadcast_bucket_size: int
        _attendance: Attendance
        _roster: Roster

    _buffer_hook: BufferHook | None = None

    @property
    def broadcast_buffers(self) -> bool:
        """The former name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with a broadcast of module buffers."""
        return (
            self.forward_sync_buffers
            and self.require_forward_param_sync
            and len(self._roster.buffers()) > 0
        )

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether a forward begins with :meth:`_sync_buffers` now, if there are any."""
        return self._syncs_buffers(after_forward=False)

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Whether a forward ends with it, as a hook wants it."""
        return self._syncs_buffers(after_forward=True)

    def _syncs_buffers(self, after_forward: bool) -> bool:
        hook_is_last = self._buffer_hook is not None and self._buffer_hook.is_after_forward
        return (
            hook_is_last is after_forward
            and self.forward_sync_buffers
            and self.require_forward_param_sync
        )

    def _sync_buffers(self) -> None:
        named_buffers = dict(self._roster.buffers())
        if not named_buffers:
            return
        buffers = list(named_buffers.values())
        with preserve_version_counters(buffers):
            if self._buffer_hook is None:
                self._broadcast(
                    buffers,
                    f"step {self.reducer.counters.reductions + 1}, forward",
                    f"buffers ({listed(list(named_buffers))})",
                )
            else:
                self.reducer._install_post_backward_futures(self._buffer_hook(named_buffers))

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Synchronise module buffers by ``hook`` instead of a broadcast from rank 0.

        It runs in the forwards that would broadcast (see ``forward_sync_buffers``), and changes
        the buffers in place, with whatever collectives it likes. As in stock it has their place:
        a second call replaces the hook.

        Args:
            state: handed to the hook.
            hook: ``hook(state, {name: buffer})``, with names as the wrapped module has them. May
                return a list of :class:`torch.futures.Future`, which are waited for at the end of
                the next backward.
            comm_hook_location: ``PRE_FORWARD`` or ``POST_FORWARD`` of
                ``torch.nn.parallel.distributed._BufferCommHookLocation``.

        Raises:
            TypeError: ``hook`` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}")
        self._buffer_hook = BufferHook(
            hook, state, comm_hook_location == BufferCommHookLocation.POST_FORWARD
        )

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """What happens to buffers without a hook, for hooks that add something to it.

        Args:
            bufs: all buffers of the module by default.
            bucket_size: most bytes of one message.
            authoritative_rank: whose values all get, by its rank in the process group.

        Raises:
            TypeError: ``bufs`` are no tensors.
        """
        if bufs is not None and not (
            isinstance(bufs, Sequence) and all(isinstance(each, Tensor) for each in bufs)
        ):
            raise TypeError(f"bufs should be a list of tensors, got {bufs!r}")
        broadcast_coalesced(
            [buffer for _, buffer in self._roster.buffers()] if bufs is None else bufs,
            self.process_group,
            authoritative_rank,
            bucket_size or self.broadcast_bucket_size,
        )

    def _broadcast(self, tensors: list[Tensor], place: str, what: str) -> None:
        """Overwrite tensors with those of one rank.

        Args:
            tensors: parameters or buffers.
            place: where in its program this rank is, for errors.
            what: what they are, for errors.
        """
        try:
            broadcast_coalesced(
                tensors,
                self.process_group,
                self._attendance.source_rank,
                self.broadcast_bucket_size,
            )
        except RuntimeError as error:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            raise RollCall(self.process_group).explain(
                f"rank {self.process_group.rank()}, {place}",
                f"broadcast of {len(tensors)} {what}, {nbytes} bytes",
                error,
            ) from error
