"""Accelerate, and libraries that use it (Trainer of transformers, TRL): wrap with tritonddp.

    accelerator = use_tritonddp(Accelerator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    trainer = Trainer(...)
    use_tritonddp(trainer.accelerator)
    trainer.train()

With ``in_place=True`` models are replicated in place instead: ``prepare()`` gives back the module.

This module does not import Accelerate: the caller passes the accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from tritonddp._arguments import check_flags
from tritonddp._torch import STOCK
from tritonddp.in_place import ddp, replicate
from tritonddp.integrations.in_place import behind
from tritonddp.integrations.replacement import instead_of_stock, stock_replaced
from tritonddp.wrapper import DistributedDataParallel

__all__ = ["instead_of_stock", "use_tritonddp"]

_Accelerator = TypeVar("_Accelerator")

_PREPARED = "_was_prepared_in_place"  # attribute of a module


def use_tritonddp(
    accelerator: _Accelerator, in_place: bool = False, **options: Any
) -> _Accelerator:
    """Make ``accelerator`` wrap models with :class:`tritonddp.DistributedDataParallel`.

    Nothing changes where it does not use torch's class: in a single process, or with FSDP or
    DeepSpeed. ``DistributedDataParallelKwargs`` and their communication hooks are kept.

    Args:
        accelerator: an ``accelerate.Accelerator`` that has not prepared its models yet.
        in_place: replicate models in place, see :func:`tritonddp.replicate`: ``prepare()`` returns
            the module itself, and any call of it counts.
        options: arguments of the wrapper that Accelerate does not know, such as ``metrics=True``.

    Returns:
        ``accelerator``.

    Raises:
        RuntimeError: it has wrapped a model already.
        TypeError: it is no accelerator, or ``in_place`` is neither on nor off.

    Example::

        from accelerate import Accelerator
        from tritonddp.integrations.accelerate import use_tritonddp

        accelerator = use_tritonddp(Accelerator())
        model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    """
    target: Any = accelerator
    check_flags({"in_place": in_place})
    prepare_model = getattr(target, "prepare_model", None)
    if prepare_model is None:
        raise TypeError(
            f"use_tritonddp() takes an accelerate.Accelerator, got {type(accelerator).__name__}; "
            "a Trainer of transformers has one as its .accelerator (pip install accelerate)"
        )
    wrapped = [model for model in getattr(target, "_models", ()) if isinstance(model, STOCK)]
    if any(not isinstance(model, DistributedDataParallel) for model in wrapped):
        raise RuntimeError(
            "this accelerator has prepared a model already, with torch's wrapper: call "
            "use_tritonddp() before prepare()"
        )

    @functools.wraps(prepare_model)
    def prepare_with_tritonddp(*args: Any, **kwargs: Any) -> Any:
        if not in_place:
            with stock_replaced(options):
                return prepare_model(*args, **kwargs)
        _forget_if_copied(args[0] if args else kwargs.get("model"))
        with stock_replaced(options, replicate), _hooks_behind(target):
            model = prepare_model(*args, **kwargs)
        wrapper = behind(model)
        if wrapper is not None:
            vars(wrapper.module)[_PREPARED] = _TrueUnlessCopied()
        return model

    target.prepare_model = prepare_with_tritonddp
    if in_place:
        _look_behind(target)
    return accelerator


class _TrueUnlessCopied:
    """Marks a model that was prepared in place; in its copies and pickles it is ``False``."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return bool, ()


def _forget_if_copied(model: Any) -> None:
    """A copy of a replicated module is a plain one, but Accelerate would take it for prepared."""
    attributes = getattr(model, "__dict__", {})
    if attributes.get(_PREPARED) is False:
        for name in (_PREPARED, "_is_accelerate_prepared"):
            attributes.pop(name, None)


class _Handler:
    """Stands for ``DistributedDataParallelKwargs``: its hooks are registered behind a module."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def to_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = self._handler.to_kwargs()
        return kwargs

    def register_comm_hook(self, model: Any) -> None:
        self._handler.register_comm_hook(ddp(model))


@contextmanager
def _hooks_behind(accelerator: Any) -> Iterator[None]:
    handler = getattr(accelerator, "ddp_handler", None)
    if handler is None:
        yield
        return
    accelerator.ddp_handler = _Handler(handler)
    try:
        yield
    finally:
        accelerator.ddp_handler = handler


def _look_behind(accelerator: Any) -> None:
    """Have the methods that ask for a wrapper find the one behind a module."""
    joined: Callable[..., AbstractContextManager[None]] = accelerator.join_uneven_inputs
    triggered: Callable[[Any], AbstractContextManager[None]] = accelerator.trigger_sync_in_backward

    @functools.wraps(joined)
    def join_uneven_inputs(
        joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        return joined([behind(each) or each for each in joinables], even_batches)

    @functools.wraps(triggered)
    def trigger_sync_in_backward(model: Any) -> AbstractContextManager[None]:
        return triggered(behind(model) or model)

    accelerator.join_uneven_inputs = join_uneven_inputs
    accelerator.trigger_sync_in_backward = trigger_sync_in_backward
