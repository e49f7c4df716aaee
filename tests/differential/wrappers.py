"""Stock DDP with a fault: what the programs have to find, whatever the package does."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as Stock


class BuffersOfVersions(Stock):
    """Buffers that autograd has not seen written are not broadcast."""

    def _sync_buffers(self) -> None:
        versions = [buffer._version for buffer in self.module.buffers()]
        if versions != getattr(self, "_versions", None):
            super()._sync_buffers()
        self._versions = [buffer._version for buffer in self.module.buffers()]


class GradientsAreOthers(Stock):
    """``.grad`` is another tensor than autograd has made."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)

        def replace(param: Tensor) -> None:
            if param.grad is not None:
                param.grad = param.grad.clone()

        for param in module.parameters():
            param.register_post_accumulate_grad_hook(replace)


class UsesAName(Stock):
    """An attribute that users may set."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        self.sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.sync is True
        return super().forward(*args, **kwargs)


class ABucketForEach(Stock):
    """Each parameter leaves as soon as it is there, whatever others there are on other ranks."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options | {"bucket_cap_mb": 1e-6})


class MadeInTheFirstForward(Stock):
    """What is kept is made in the first forward, in whatever mode that runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_kept"):
            self._kept = torch.ones(1)
        return super().forward(*args, **kwargs) * self._kept


FAULTS = {
    cls.__name__: cls
    for cls in (
        *(BuffersOfVersions, GradientsAreOthers, UsesAName, ABucketForEach),
        MadeInTheFirstForward,
    )
}
