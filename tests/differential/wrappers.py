"""Classes that play programs: tritonddp, stock DDP, and wrappers with a planted fault."""

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel


class IgnoredNoSync(DistributedDataParallel):
    """``no_sync`` does nothing. Usual and sharded programs find it."""

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


class BuffersOfVersions(Stock):
    """Buffers whose version has not changed are not broadcast. Hostile programs find it."""

    def _sync_buffers(self) -> None:
        versions = [buffer._version for buffer in self.module.buffers()]
        if versions != getattr(self, "_versions", None):
            super()._sync_buffers()
        self._versions = [buffer._version for buffer in self.module.buffers()]


class MadeInTheFirstForward(Stock):
    """A tensor is made in the first forward, in any mode. Short programs find it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_kept"):
            self._kept = torch.ones(1)
        return super().forward(*args, **kwargs) * self._kept


OURS = "tritonddp"
# A difference of "stock" in a hostile or short program is a fault of the generator.
WRAPPERS: dict[str, Any] = {OURS: DistributedDataParallel, "stock": Stock}
WRAPPERS |= {cls.__name__: cls for cls in (IgnoredNoSync, BuffersOfVersions, MadeInTheFirstForward)}
