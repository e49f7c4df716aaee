"""Optimizers that step in hooks of the parameters, before gradients are averaged: said by name.

Layerwise optimizers (GaLore, LOMO) take each gradient as soon as it is there. It is averaged later,
so that each rank trains by its own gradients; in stock DDP too, without a word.
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

# How many parameters are compared, the smallest ones, and in how many backwards: the learning rate
# of the first step may be zero.
_PARAMS, _BACKWARDS = 4, 3


class HookedSteps(Extension):
    """In the first reduced backwards, compares parameters that have hooks before and after.

    If one has changed, a hook has stepped an optimizer. It removes itself afterwards, and in the
    first backward if no parameter has a hook. ``events`` are those that call it.
    """

    def __init__(self, events: Events) -> None:
        self._events = weakref.ref(events)  # which hold this
        self._left = _BACKWARDS
        self._before: list[tuple[str, Tensor, Tensor]] = []

    def on_begin(self, backward: Backward) -> None:
        """Keep the values of some parameters with hooks."""
        reduction, self._before = backward.reduction, []
        if reduction is None or reduction.is_captured:
            return
        current = reduction.bucket_set
        named = zip(current.names, current.params, strict=True)
        # (Communication hooks may step optimizers by means.)
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
        """Compare them."""
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
                "%s: %s changed in the backward, before the gradients were averaged over the "
                "ranks. If a hook of these parameters steps an optimizer, each rank trains by its "
                "own gradients: step after backward(), or by torch.distributed.optim."
                "_apply_optimizer_in_backward, whose steps wait for the mean. It is said once",
                backward.where,
                listed(changed),
            )

    def _remove(self) -> None:
        events = self._events()
        if events is not None:
            events.remove(self)
