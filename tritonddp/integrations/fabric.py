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

    Takes the same arguments, and passes those that Fabric does not know to the wrapper. Import it
    after the Fabric that you use, if both ``lightning`` and ``lightning_fabric`` are installed.

    Example::

        from lightning_fabric import Fabric  # or lightning.fabric
        from tritonddp.integrations.fabric import TritonDDPStrategy

        fabric = Fabric(strategy=TritonDDPStrategy(), devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(module, optimizer)
        fabric.backward(loss_function(model(inputs), targets))
    """

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap ``module``: Fabric calls it."""
        device_ids = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)
