"""Warning about optimizers that step in parameter hooks, before gradients are averaged.

Layerwise optimizers (GaLore, LOMO) use each gradient as soon as it is ready. It is averaged later,
so each rank trains on local gradients. Stock DDP does the same without a warning.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor

from tritonddp._torch import backward_hooks_of, hooks_after_accumulation
from tritonddp.coordination.failures import listed
from tritonddp.coordination.verify import is_plain
from tritonddp.reducer.extension import Events, Extension
from tritonddp.reducer.graph.backward import Backward

logger = logging.getLogger(__name__)

# Number of parameters that are compared (the smallest), and of backwards: the learning rate of the
# first step may be zero.
_PARAMS, _BACKWARDS = 4, 3


class HookedSteps(Extension):
    """Compares parameters with hooks before and after the first reduced backwards.

    If a parameter has changed, a hook has stepped an optimizer. This extension removes itself
    afterwards, or in the first backward if no parameter has a hook. ``events`` call it.
    """

    def __init__(self, events: Events) -> None:
        self._events = weakref.ref(events)  # they refer to this object
        self._left = _BACKWARDS
        self._before: list[tuple[str, Tensor, Tensor]] = []

    def on_begin(self, backward: Backward) -> None:
        """Save the values of some parameters with hooks."""
        reduction, self._before = backward.reduction, []
        if reduction is None or reduction.is_captured:
            return
        current = reduction.bucket_set
        named = zip(current.names, current.params, strict=True)
        # Communication hooks may step optimizers with means.
        hooked = [
            (name, param)
            for name, param in named
            if current.averages
            and is_plain(param)
            and (hooks_after_accumulation(param) or backward_hooks_of(param))
        ]
        hooked.sort(key=lambda each: each[1].numel())
        self._before = [(name, p, p.detach().clone()) for name, p in hooked[:_PARAMS]]
        if not hooked:
            self._remove()

    def on_compute_end(self, backward: Backward) -> None:
        """Compare the parameters with the saved values."""
        before, self._before = self._before, []
        changed = [
            name
            for name, param, value in before
            if not torch.allclose(param, value, rtol=0, atol=0, equal_nan=True)
        ]
        self._left -= bool(before)
        if changed or self._left == 0:
            self._remove()
        if changed:
            logger.warning(
                "%s: %s changed during the backward, before their gradients were averaged over "
                "the ranks. If a parameter hook steps an optimizer, each rank trains on its local "
                "gradients. Step after backward(), or use "
                "torch.distributed.optim._apply_optimizer_in_backward, which steps with averaged "
                "gradients. (Shown once.)",
                backward.where,
                listed(changed),
            )

    def _remove(self) -> None:
        events = self._events()
        if events is not None:
            events.remove(self)
