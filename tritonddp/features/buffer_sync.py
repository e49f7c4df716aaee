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
    """What a user has put in the place of the broadcast."""

    # Changes the buffers in place; may return futures of what it leaves under way.
    hook: Callable[[Any, dict[str, Tensor]], Sequence[torch.futures.Future] | None]
    state: Any  # handed to it
    is_after_forward: bool  # it runs after the module's forward, not before


def sync_buffers(
    parameters: ModuleParameters,
    broadcast: StateBroadcast,
    reducer: Reducer,
    hook: BufferHook | None,
) -> None:
    """Give all ranks the same module buffers, if there are any.

    The reducer waits at the end of its next backward for what a hook leaves under way.
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
            with torch.no_grad():
                reducer.post_backward.extend(hook.hook(hook.state, named_buffers) or ())
