"""Accelerate, and libraries that use it (Trainer of transformers, TRL): wrap with tritonddp.

    use_tritonddp(trainer.accelerator)  # before trainer.train()

This module does not import Accelerate: the caller passes the accelerator.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from tritonddp._torch import STOCK
from tritonddp.integrations.replacement import instead_of_stock, stock_replaced
from tritonddp.wrapper import DistributedDataParallel

__all__ = ["instead_of_stock", "use_tritonddp"]

_Accelerator = TypeVar("_Accelerator")


def use_tritonddp(accelerator: _Accelerator, **options: Any) -> _Accelerator:
    """Make ``accelerator`` wrap models with :class:`tritonddp.DistributedDataParallel`.

    Nothing changes where Accelerate does not use torch's class: in a single process, or with FSDP
    or DeepSpeed. ``DistributedDataParallelKwargs`` and their communication hooks are kept.

    Args:
        accelerator: an ``accelerate.Accelerator`` that has not prepared its models yet.
        options: wrapper arguments that Accelerate does not know, for example ``metrics=True``.

    Returns:
        ``accelerator``.

    Raises:
        RuntimeError: it has already wrapped a model.
        TypeError: it is not an accelerator.

    Example::

        from accelerate import Accelerator
        from tritonddp.integrations.accelerate import use_tritonddp

        accelerator = use_tritonddp(Accelerator())
        model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    """
    target: Any = accelerator
    prepare_model = getattr(target, "prepare_model", None)
    if prepare_model is None:
        raise TypeError(
            "use_tritonddp() requires an accelerate.Accelerator, got "
            f"{type(accelerator).__name__}. A Trainer of transformers holds one in .accelerator "
            "(pip install accelerate)"
        )
    wrapped = [model for model in getattr(target, "_models", ()) if isinstance(model, STOCK)]
    if any(not isinstance(model, DistributedDataParallel) for model in wrapped):
        raise RuntimeError(
            "this accelerator has already prepared a model with torch's wrapper: call "
            "use_tritonddp() before prepare()"
        )

    @functools.wraps(prepare_model)
    def prepare_with_tritonddp(*args: Any, **kwargs: Any) -> Any:
        with stock_replaced(options):
            return prepare_model(*args, **kwargs)

    target.prepare_model = prepare_with_tritonddp
    return accelerator
