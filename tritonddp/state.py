"""What a wrapper holds beyond stock's attributes, behind its one private attribute ``_ddp_state``.

So a user may set any other attribute on the wrapper, and a subclass may hand on to the module
whatever the wrapper does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp.comm.broadcast import StateBroadcast
from tritonddp.compiled.operators import Traced
from tritonddp.config import DDPConfig
from tritonddp.coordination.group import Group
from tritonddp.diagnostics.logging_data import Logger
from tritonddp.features.auto_compression.probe import Figures
from tritonddp.features.buffer_sync import BufferSync
from tritonddp.features.mixed_precision import LowPrecision
from tritonddp.features.weighted_mean import AccumulationWindow
from tritonddp.reducer.extension import SyncState
from tritonddp.reducer.reducer import Reducer


@dataclass(eq=False)
class DDPState:
    """The objects and options of one wrapper.

    Attributes:
        config: the checked arguments.
        device: of the first parameter.
        is_sliced: parameters are local parts of those of a device mesh.
        init_sync: parameters and buffers are sent at construction.
        low_precision: runs the module with ``mixed_precision``.
        figures: what ``compression="auto"`` has measured; None in another group.
        finalizes_manually: see ``require_manual_backward_finalization``.
        builtin_hook: communication hook of torch in C++, if one is registered.
        buffer_hook: registered by the user, instead of ``buffer_sync``.
        buffer_hook_is_after: it runs after the module's forward, not before.
        group: the ranks. It and all that follows are made again for a new process group.
        sync: what the user wants of the next backward.
        state_broadcast: sends parameters and buffers.
        buffer_sync: synchronises buffers before forwards.
        core: reduces gradients.
        traced: forwards that ``torch.compile`` has traced into one graph.
        logger: configuration and statistics.
        window: counts what weighted backwards have accumulated, once there is one.
    """

    wrapped: ClassVar[int] = 0  # number of modules wrapped in this process

    config: DDPConfig
    device: torch.device
    group: Group
    sync: SyncState
    is_sliced: bool
    init_sync: bool
    low_precision: LowPrecision | None = None
    figures: Figures | None = None
    finalizes_manually: bool = False
    builtin_hook: dist.BuiltinCommHookType | None = None
    buffer_hook: Callable[[dict[str, Tensor]], Any] | None = None
    buffer_hook_is_after: bool = False
    state_broadcast: StateBroadcast = field(init=False)
    buffer_sync: BufferSync = field(init=False)
    core: Reducer = field(init=False)
    traced: Traced = field(init=False)
    logger: Logger = field(init=False)
    window: AccumulationWindow | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name not in _OF_THE_GROUP}


# Attributes that are made again for a new process group, and the group itself.
_OF_THE_GROUP = {
    *("group", "sync", "state_broadcast", "buffer_sync", "core", "traced", "logger", "window"),
}
