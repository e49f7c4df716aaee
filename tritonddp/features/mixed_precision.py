"""Forward and backward in low precision, parameters and gradients in full (``mixed_precision``).

What gradients travel in is decided in ``buckets/formats.py``.

While the module runs, casts of its parameters stand in their places. Autograd knows them as results
of a cast: it casts gradients back and accumulates them in the parameters' own dtype. So parameters
never change, ``.grad`` is in full precision from the start, also under ``no_sync`` and where a
parameter is used twice, and readiness is that of any other model. On a GPU all of it happens on the
stream that the module runs on.

A checkpoint runs a part of the module again during the backward, when parameters are back in their
places: hooks on all modules put casts there for that time.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tritonddp._torch import MixedPrecision, cast_inputs, current_graph_task_id
from tritonddp.buckets.sparse_bucket import sparse_parameters
from tritonddp.kernels.flat_buffer import DTYPES


class LowPrecision:
    """Runs ``module`` in the dtypes of ``config``, and casts its buffers for good.

    ``ignored`` are names of parameters and buffers that keep their dtypes.
    """

    def __init__(self, module: nn.Module, config: MixedPrecision, ignored: Collection[str]) -> None:
        self._dtype = config.param_dtype
        self._ignored = set(ignored)
        self._kept: set[Tensor] = set()  # parameters that are ignored
        self._is_running = False
        self._has_run = False
        # While a part of the module is recomputed: the modules that run, the innermost one last,
        # and what has to be put back.
        self._recomputed: list[nn.Module] = []
        self._replaced: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []
        self._name_params(module)
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in self._ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)
        if self._dtype is not None:
            self._watch(module)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``module`` returns, in low precision, for these inputs, which are cast too."""
        if self._dtype is None or self._is_running:
            return module(*args, **kwargs)
        args, kwargs = cast_inputs(self._dtype, args, kwargs)
        self._put_back(self._replaced)  # of a recomputation that broke off
        self._recomputed.clear()
        if self._ignored:
            named = module.named_parameters()
            self._kept = {param for name, param in named if name in self._ignored}
        self._watch(module)
        replaced = self._replace(module)
        self._is_running = self._has_run = True
        try:
            return module(*args, **kwargs)
        finally:
            self._is_running = False
            self._put_back(replaced)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module alone has these hooks too, but no graph that this class has made."""
        return self.__dict__ | {"_has_run": False}

    def remove_hooks_with(self, wrapper: object) -> None:
        """Leave the module as it was when ``wrapper`` goes."""
        weakref.finalize(wrapper, self._remove_hooks).atexit = False

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watch(self, module: nn.Module) -> None:
        """Have hooks on all modules, also on those that were added.

        (Asked of the modules: a list of them here would be part of each copy of one.)
        """
        for each in module.modules():
            hooks = each._forward_pre_hooks.values()
            if all(getattr(hook, "__self__", None) is not self for hook in hooks):
                self._hooks += [
                    each.register_forward_pre_hook(self._begin_recomputing, prepend=True),
                    each.register_forward_hook(self._end_recomputing, always_call=True),
                ]

    def _name_params(self, module: nn.Module) -> None:
        """As in stock DDP, parameters tell what they are cast from and, without memory, to."""
        for name, param in module.named_parameters():
            if name not in self._ignored:
                low = torch.empty((), dtype=self._dtype or param.dtype, device=param.device)
                param._mp_param = low.expand(param.shape)  # type: ignore[attr-defined]
                param._fp_param = param.data  # type: ignore[attr-defined]

    def _replace(self, part: nn.Module) -> list[tuple[Any, str, Any]]:
        """Put casts in the places of all parameters of ``part``; returns what was where."""
        modules = list(part.modules())
        sparse = sparse_parameters(modules)
        replaced: list[tuple[Any, str, Any]] = []
        low: dict[Tensor, Tensor] = {}
        for module in modules:
            for key, param in module._parameters.items():
                if param is None or not param.is_floating_point() or param in self._kept:
                    continue
                if param in sparse and param.dtype != self._dtype and param not in low:
                    low[param] = _Cast.apply(param, self._dtype)
                elif param not in low:
                    low[param] = param.to(self._dtype)
                replaced.append((module._parameters, key, param))
            if isinstance(module, nn.RNNBase):  # has its parameters in another place as well
                replaced.append((module.__dict__, "_flat_weights", module._flat_weights))
        for table, key, former in replaced:
            is_list = isinstance(former, list)
            table[key] = [low.get(each, each) for each in former] if is_list else low[former]
        return replaced

    @staticmethod
    def _put_back(replaced: list[tuple[Any, str, Any]]) -> None:
        for table, key, former in replaced:
            table[key] = former
        replaced.clear()

    def _begin_recomputing(self, module: nn.Module, _: Any) -> None:
        if self._recomputed:
            self._recomputed.append(module)
        elif self._has_run and not self._is_running and current_graph_task_id() != -1:
            self._recomputed.append(module)
            self._replaced = self._replace(module)

    def _end_recomputing(self, module: nn.Module, *_: Any) -> None:
        if self._recomputed and self._recomputed[-1] is module:
            self._recomputed.pop()
            if not self._recomputed:
                self._put_back(self._replaced)


class _Cast(torch.autograd.Function):
    """``Tensor.to``, whose own backward takes no sparse gradients."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = param.dtype
        return param.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def check_mixed_precision(config: Any) -> None:
    """Raise a TypeError or a ValueError if the constructor's ``mixed_precision`` cannot be this."""
    if not isinstance(config, MixedPrecision):
        raise TypeError(
            "mixed_precision should be a torch.nn.parallel.distributed._MixedPrecision, got "
            f"{type(config).__name__}"
        )
    wire_dtype = config.reduce_dtype or config.param_dtype
    if wire_dtype is not None and wire_dtype not in DTYPES:
        raise ValueError(
            f"mixed_precision reduces gradients in {wire_dtype}; tritonddp can do it in "
            f"{', '.join(map(str, DTYPES))}: set reduce_dtype"
        )
