"""Lightning Fabric: a strategy that wraps the model with tritonddp."""

from __future__ import annotations

from typing import Any

from torch import nn

from tritonddp.integrations.strategies import lightning_class
from tritonddp.wrapper import DistributedDataParallel

_PACKAGES = "lightning.fabric", "lightning_fabric"
_Base: Any = lightning_class(__name__, "strategies.DDPStrategy", *_PACKAGES)


class TritonDDPStrategy(_Base):
    """Fabric's ``DDPStrategy`` with :class:`tritonddp.DistributedDataParallel` as the wrapper.

    Accepts the same arguments, and passes arguments unknown to Fabric to the wrapper. If both
    ``lightning`` and ``lightning_fabric`` are installed, import it after the one that you use.

    Example::

        from lightning_fabric import Fabric  # or lightning.fabric
        from tritonddp.integrations.fabric import TritonDDPStrategy

        fabric = Fabric(strategy=TritonDDPStrategy(), devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(module, optimizer)
        fabric.backward(loss_function(model(inputs), targets))
    """

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap ``module``; called by Fabric."""
        device_ids = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)
