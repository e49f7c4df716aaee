"""Lightning Fabric: a strategy that wraps the model with tritonddp."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from tritonddp._arguments import check_flags
from tritonddp.in_place import ddp
from tritonddp.integrations.in_place import replicated
from tritonddp.integrations.strategies import lightning_class
from tritonddp.wrapper import DistributedDataParallel

_PACKAGES = "lightning.fabric", "lightning_fabric"
_Base: Any = lightning_class(__name__, "strategies.DDPStrategy", *_PACKAGES)


class TritonDDPStrategy(_Base):
    """Fabric's ``DDPStrategy`` with :class:`tritonddp.DistributedDataParallel` as the wrapper.

    Takes the same arguments, and passes those that Fabric does not know to the wrapper. Import it
    after the Fabric that you use, if both ``lightning`` and ``lightning_fabric`` are installed.

    Args:
        in_place: replicate the module in place, see :func:`tritonddp.replicate`. Its methods need
            no ``mark_forward_method()`` then, and get no precision or autocast of Fabric either, as
            on one device.
        *args: of Fabric's.
        **kwargs: of Fabric's, and of the wrapper.

    Raises:
        TypeError, ValueError: ``in_place`` is neither on nor off; or in ``setup()``, as
            :func:`tritonddp.replicate`, and if a module was replicated with other options before.

    Example::

        from lightning_fabric import Fabric  # or lightning.fabric
        from tritonddp.integrations.fabric import TritonDDPStrategy

        fabric = Fabric(strategy=TritonDDPStrategy(), devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(module, optimizer)
        fabric.backward(loss_function(model(inputs), targets))
    """

    def __init__(self, *args: Any, in_place: bool = False, **kwargs: Any) -> None:
        check_flags({"in_place": in_place})
        super().__init__(*args, **kwargs)
        self._is_in_place = bool(in_place)
        if in_place:
            self._backward_sync_control = _SyncControl()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap ``module``, or replicate it and return it itself: Fabric calls it."""
        device_ids = self._determine_ddp_device_ids()
        if self._is_in_place:
            replicated(module, device_ids, self._ddp_kwargs)
            return module
        return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)


class _SyncControl:
    """``fabric.no_backward_sync()`` of replicated modules; Fabric's own insists on a wrapper."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return ddp(module).no_sync() if enabled else nullcontext()
