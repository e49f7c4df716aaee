"""The numbers of ``metrics()``, for the loggers of trainers."""

from __future__ import annotations

from typing import Any

from tritonddp.ddp import DistributedDataParallel
from tritonddp.integrations.in_place import behind


def numbers_of(model: Any) -> dict[str, float]:
    """The numbers in ``metrics()``, under names that begin with ``ddp/``. Words are left out.

    Raises:
        RuntimeError: the model was wrapped without ``metrics=True``.
        TypeError: it was not wrapped with tritonddp, or replicated.
    """
    wrapper = behind(model)
    if wrapper is None:
        raise TypeError(
            "the callback logs metrics() of a model that tritonddp.DistributedDataParallel wraps, "
            "or tritonddp.replicate() replicates, but the trainer has a "
            f"{type(model).__module__}.{type(model).__qualname__}: use an adapter of "
            "tritonddp.integrations, and start it with torchrun"
        )
    found = DistributedDataParallel.metrics(wrapper).items()
    return {f"ddp/{name}": value for name, value in found if isinstance(value, int | float)}
