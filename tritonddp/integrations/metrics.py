"""The numbers of ``metrics()``, for the loggers of trainers."""

from __future__ import annotations

from typing import Any

from tritonddp.ddp import DistributedDataParallel
from tritonddp.integrations.in_place import of_trainer


def numbers_of(model: Any) -> dict[str, float]:
    """The numbers in ``metrics()``, under names that begin with ``ddp/``. Words are left out.

    Raises:
        RuntimeError: the model was wrapped without ``metrics=True``.
        TypeError: it was not wrapped with tritonddp, or replicated.
    """
    wrapper = of_trainer(model, "logs metrics()")
    found = DistributedDataParallel.metrics(wrapper).items()
    return {f"ddp/{name}": value for name, value in found if isinstance(value, int | float)}
