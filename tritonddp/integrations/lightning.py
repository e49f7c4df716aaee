"""Lightning: a strategy that wraps the model with tritonddp.

from tritonddp.integrations.lightning import TritonDDPStrategy

Trainer(strategy=TritonDDPStrategy(), devices=2)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tritonddp.ddp import DistributedDataParallel
from tritonddp.integrations.strategies import ddp_strategy

_Base: Any = ddp_strategy(__name__, "lightning.pytorch", "pytorch_lightning")


class TritonDDPStrategy(_Base):
    """Lightning's ``DDPStrategy`` with :class:`tritonddp.DistributedDataParallel` as the wrapper.

    Takes the same arguments. Those that Lightning does not know itself go on to the wrapper; what
    the name of a strategy says in Lightning (``ddp_find_unused_parameters_true``) is not needed.
    Import it after the Lightning that you use, if both are installed.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
        )
