"""What adapters need to replicate a module in place, where their library expects a wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tritonddp.in_place import ddp, replicate
from tritonddp.wrapper import DistributedDataParallel


def behind(model: Any) -> DistributedDataParallel | None:
    """The wrapper that ``model`` is, or that works behind it; ``None`` if there is none of ours."""
    if isinstance(model, DistributedDataParallel):
        return model
    try:
        return ddp(model)
    except TypeError:
        return None


def should_stop(model: Any) -> bool:
    """``should_stop()`` of the wrapper that the model of a trainer is, or that works behind it.

    Raises:
        TypeError: there is none of ours.
    """
    wrapper = behind(model)
    if wrapper is None:
        raise TypeError(
            "the callback asks should_stop() of a model that tritonddp.DistributedDataParallel "
            "wraps, or tritonddp.replicate() replicates, but the trainer has a "
            f"{type(model).__module__}.{type(model).__qualname__}: use an adapter of "
            "tritonddp.integrations, and start it with torchrun"
        )
    return wrapper._ddp_state.should_stop()


def replicated(
    module: nn.Module, device_ids: Any, options: Mapping[str, Any]
) -> DistributedDataParallel:
    """Replicate ``module`` in place, unless an earlier training has; returns the wrapper behind it.

    Args:
        module: of the user.
        device_ids, options: for :func:`tritonddp.replicate`.

    Raises:
        TypeError: the module cannot be replicated, or an option is unknown.
        ValueError: so too; or it is replicated already, with other options.
    """
    wrapper = behind(module)
    if wrapper is None:
        wrapper = ddp(replicate(module, device_ids=device_ids, **options))
        wrapper._ddp_state.in_place_options = dict(options)
    elif options and options != wrapper._ddp_state.in_place_options:
        raise ValueError(
            f"this {type(module).__name__} is replicated already, and not with the options "
            f"{', '.join(options)} as they are now: give the strategy those of then, or none"
        )
    return wrapper
