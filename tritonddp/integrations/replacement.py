"""Replaces torch's class with tritonddp's, for code in which the wrapper cannot be chosen.

The name ``DistributedDataParallel`` in ``torch.nn.parallel`` and ``torch.nn.parallel.distributed``
then refers to tritonddp's class. A module that imported torch's class by name before keeps torch's
class, so call the replacement before importing such modules.
"""

from __future__ import annotations

import sys
import types
import warnings
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.parallel.distributed

from tritonddp._torch import STOCK
from tritonddp.state import DDPState
from tritonddp.wrapper import DistributedDataParallel

_OFFERED = "_offered_instead"
_is_for_good = False


class _Offers(types.ModuleType):
    """The class of the module ``torch.nn.parallel.distributed`` while it provides our class.

    ``module.DistributedDataParallel`` is our class, or a class that other code has set since. The
    module's globals still hold torch's class, which its methods need.
    """

    @property
    def DistributedDataParallel(self) -> Any:
        return vars(self).get(_OFFERED, DistributedDataParallel)

    @DistributedDataParallel.setter
    def DistributedDataParallel(self, value: Any) -> None:
        vars(self)[_OFFERED] = value

    def __getattribute__(self, name: str) -> Any:
        # Otherwise, code that has read the name before caches it, as for plain modules.
        return super().__getattribute__(name)


def replace_stock() -> None:
    """Replace torch's ``DistributedDataParallel`` with tritonddp's, for the rest of this process.

    Call it in every process, before importing the code that wraps models. It may be called again.

    Warns:
        UserWarning: modules have already imported torch's class by name, and keep it. The warning
            names them.

    Example::

        import tritonddp

        tritonddp.replace_stock()
        model = torch.nn.parallel.DistributedDataParallel(module)  # as libraries do: tritonddp's
    """
    global _is_for_good
    bound = [] if _is_for_good else _bound()
    _is_for_good = True
    _replace()  # even if other code has set another class since
    if bound:
        in_ray = (
            ' In Ray workers, use ray.init(runtime_env={"worker_process_setup_hook": '
            '"tritonddp.replace_stock"}) to call it early enough.'
        )
        warnings.warn(
            f"{_sentence(bound)} If they wrap models, call replace_stock() before importing them, "
            "or use an adapter from tritonddp.integrations."
            f"{in_ray if 'ray' in sys.modules else ''}",
            stacklevel=2,
        )


@contextmanager
def instead_of_stock() -> Iterator[None]:
    """Replace torch's ``DistributedDataParallel`` with tritonddp's in this context.

    It affects the whole process, so leave it as soon as the model is wrapped.

    Warns:
        UserWarning: nothing was wrapped with tritonddp's class inside. The warning names the
            modules that had already imported torch's class by name.

    Example::

        with tritonddp.instead_of_stock():
            model = torch.nn.parallel.DistributedDataParallel(module)  # by a library, say
    """
    wrapped = DDPState.wrapped
    with stock_replaced():
        yield
    if DDPState.wrapped == wrapped:
        advice = "Enter the context before wrapping the model, and leave it afterwards."
        if bound := _bound():
            advice = (
                f"{_sentence(bound)} Enter the context before importing them, or use an adapter "
                "from tritonddp.integrations."
            )
        message = f"Nothing was wrapped with tritonddp inside instead_of_stock(). {advice}"
        warnings.warn(message, stacklevel=3)


@contextmanager
def stock_replaced(options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Like :func:`instead_of_stock`, without the warning if nothing is wrapped inside.

    Wrappers that are created inside also receive ``options``.
    """
    parallel: Any = torch.nn.parallel
    before, kind = parallel.DistributedDataParallel, type(torch.nn.parallel.distributed)
    _replace()
    if options:
        parallel.DistributedDataParallel = _with(options)
        parallel.distributed.DistributedDataParallel = parallel.DistributedDataParallel
    try:
        yield
    finally:
        if not _is_for_good:
            parallel.DistributedDataParallel = before
            vars(parallel.distributed).pop(_OFFERED, None)
            parallel.distributed.__class__ = kind
        elif options:
            _replace()


def _with(options: Mapping[str, Any]) -> type:
    """Return a class whose constructor creates wrappers with ``options``; ``isinstance`` works."""

    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        return DistributedDataParallel(*args, **{**kwargs, **options})

    kind = ABCMeta("DistributedDataParallel", (), {"__new__": made})
    kind.register(DistributedDataParallel)
    return kind


def _replace() -> None:
    parallel: Any = torch.nn.parallel
    parallel.DistributedDataParallel = DistributedDataParallel
    parallel.distributed.__class__ = _Offers
    vars(parallel.distributed).pop(_OFFERED, None)


def _bound() -> list[str]:
    """Return the modules outside torch that hold torch's class under any name."""
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("torch", "tritonddp", "__mp_main__")
        and any(value is STOCK for value in list(getattr(module, "__dict__", {}).values()))
    )


def _sentence(bound: list[str]) -> str:
    return (
        "These modules imported torch's DistributedDataParallel by name earlier, and keep it: "
        f"{', '.join(bound)}."
    )
