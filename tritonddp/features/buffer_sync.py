"""Module buffers: which forwards synchronise them, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonddp._torch import preserve_version_counters
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.broadcast import StateBroadcast
from tritonddp.coordination.failures import listed
from tritonddp.reducer.reducer import Reducer


@dataclass(frozen=True)
class BufferHook:
    """What a user has put in the place of the broadcast.

    Attributes:
        hook: changes the buffers in place; may return futures of what it leaves under way.
        state: handed to it.
        is_after_forward: it runs after the module's forward, not before.
    """

    hook: Callable[[Any, dict[str, Tensor]], Sequence[torch.futures.Future] | None]
    state: Any
    is_after_forward: bool

    @torch.no_grad()
    def __call__(self, named_buffers: dict[str, Tensor]) -> Sequence[torch.futures.Future]:
        """Run the hook; returns what is still under way."""
        return self.hook(self.state, named_buffers) or ()


def sync_buffers(
    parameters: ModuleParameters,
    broadcast: StateBroadcast,
    reducer: Reducer,
    hook: BufferHook | None,
) -> None:
    """Give all ranks the same module buffers, if there are any.

    Args:
        parameters: has them.
        broadcast: what happens to them without a hook.
        reducer: waits at the end of its next backward for what a hook leaves under way.
        hook: the user's, instead of a broadcast.
    """
    named_buffers = dict(parameters.buffers())
    if not named_buffers:
        return
    buffers = list(named_buffers.values())
    with preserve_version_counters(buffers):
        if hook is None:
            broadcast.send(
                buffers,
                f"step {reducer.counters.reductions + 1}, forward",
                f"buffers ({listed(list(named_buffers))})",
            )
        else:
            reducer.post_backward.extend(hook(named_buffers))


def check_buffers(buffers: Any) -> None:
    """Are these tensors?

    Raises:
        TypeError: they are not.
    """
    if not (isinstance(buffers, Sequence) and all(isinstance(each, Tensor) for each in buffers)):
        raise TypeError(f"bufs should be a list of tensors, got {buffers!r}")
