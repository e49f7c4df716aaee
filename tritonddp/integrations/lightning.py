"""Lightning: a strategy that wraps the model with tritonddp.

from tritonddp.integrations.lightning import TritonDDPStrategy

Trainer(strategy=TritonDDPStrategy(), devices=2)
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from tritonddp.ddp import DistributedDataParallel


def _ddp_strategy() -> Any:
    """``DDPStrategy`` of the Lightning that is in use.

    It is published as ``lightning`` and as ``pytorch_lightning``, whose classes are not the same,
    and where the first is installed the second is too.
    """
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(f"{name}.strategies").DDPStrategy
        except ModuleNotFoundError as error:
            # A name of another package: this one is there, and lacks something itself.
            if not f"{name}.strategies".startswith(error.name or "?"):
                raise
    raise ImportError(
        "tritonddp.integrations.lightning needs Lightning, which is not installed: "
        "pip install lightning (or pytorch-lightning)"
    )


class TritonDDPStrategy(_ddp_strategy()):  # type: ignore[misc]
    """Lightning's ``DDPStrategy`` with :class:`tritonddp.DistributedDataParallel` as the wrapper.

    Takes the same arguments. Those that Lightning does not know itself go on to the wrapper; what
    the name of a strategy says in Lightning (``ddp_find_unused_parameters_true``) is not needed.
    Import it after the Lightning that you use, if both are installed.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
        )
