"""Forward and backward in low precision, parameters and gradients in full (``mixed_precision``).

``buckets/formats.py`` decides the dtype in which gradients are sent.

While the module runs, casts replace its parameters. Autograd records the casts: it casts gradients
back, and accumulates them in the dtype of the parameters. Parameters therefore never change.
``.grad`` is always in full precision, even under ``no_sync`` and for a parameter that is used
twice, and gradients become ready as in any other model. On a GPU, all of this runs on the stream of
the module.

Activation checkpointing runs a part of the module again during the backward, when the parameters
are already restored. Hooks on all modules replace them by casts during that time.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tritonddp._modes import outside_modes
from tritonddp._torch import MixedPrecision, cast_inputs, current_graph_task_id
from tritonddp.buckets.grad_storage.sparse_rows import sparse_parameters
from tritonddp.buckets.ignored import Ignored, parameters_of
from tritonddp.coordination.verify import is_plain
from tritonddp.kernels.flat_buffer import DTYPES


class LowPrecision:
    """Runs ``module`` in the dtypes of ``config``, and casts its buffers permanently.

    ``ignored`` parameters and buffers keep their dtypes.
    """

    def __init__(self, module: nn.Module, config: MixedPrecision, ignored: Ignored) -> None:
        self._dtype = config.param_dtype
        self._ignored = ignored
        self._kept: set[Tensor] = set()  # ignored parameters
        self._is_running = False
        self._has_run = False
        # During a recomputation: the running modules, innermost last, and the parameters to restore
        # afterwards.
        self._recomputed: list[nn.Module] = []
        self._replaced: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []
        self._name_params(module)
        if config.buffer_dtype is not None:
            for _, buffer in ignored.buffers(module):
                if buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)
        if self._dtype is not None:
            self._add_hooks(module)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run ``module`` in low precision, including its inputs. Return its output."""
        if self._dtype is None or self._is_running:
            return module(*args, **kwargs)
        args, kwargs = cast_inputs(self._dtype, args, kwargs)
        self._put_back(self._replaced)  # left by a failed recomputation
        self._recomputed.clear()
        if self._ignored.names:
            others = {param for _, param in self._ignored.parameters(module)}
            self._kept = {p for _, p in parameters_of(module) if p not in others}
        self._add_hooks(module)
        replaced = self._replace(module)
        self._is_running = self._has_run = True
        try:
            return module(*args, **kwargs)
        finally:
            self._is_running = False
            self._put_back(replaced)

    def __getstate__(self) -> dict[str, Any]:
        """Copy with the module's hooks, but without the graphs of this object."""
        return self.__dict__ | {"_has_run": False}

    def remove_hooks_with(self, wrapper: object) -> None:
        """Remove the hooks from the module when ``wrapper`` is freed."""
        weakref.finalize(wrapper, self._remove_hooks).atexit = False

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _add_hooks(self, module: nn.Module) -> None:
        """Register hooks on all modules that lack them, for example modules added later.

        Do not keep a list of modules here: every copy of a module would copy it.
        """
        for each in module.modules():
            hooks = each._forward_pre_hooks.values()
            if all(getattr(hook, "__self__", None) is not self for hook in hooks):
                self._hooks += [
                    each.register_forward_pre_hook(self._begin_recomputing, prepend=True),
                    each.register_forward_hook(self._end_recomputing, always_call=True),
                ]

    def _name_params(self, module: nn.Module) -> None:
        """Set ``_fp_param`` and ``_mp_param`` as stock DDP does. ``_mp_param`` takes no memory."""
        for _, param in self._ignored.parameters(module):
            with outside_modes([param]):
                low = torch.empty((), dtype=self._dtype or param.dtype, device=param.device)
                param._mp_param = low.expand(param.shape)  # type: ignore[attr-defined]
                param._fp_param = param.data  # type: ignore[attr-defined]

    def _replace(self, part: nn.Module) -> list[tuple[Any, str, Any]]:
        """Replace all parameters of ``part`` by casts. Return the input for :meth:`_put_back`."""
        modules = list(part.modules())
        sparse = sparse_parameters(modules)
        replaced: list[tuple[Any, str, Any]] = []
        low: dict[Tensor, Tensor] = {}
        for module in modules:
            for key, param in module._parameters.items():
                if param is None or not param.is_floating_point() or param in self._kept:
                    continue
                if not (param.requires_grad or is_plain(param)):
                    continue  # quantized weights: their layers handle the dtype of inputs
                if param in sparse and param.dtype != self._dtype and param not in low:
                    low[param] = _Cast.apply(param, self._dtype)
                elif param not in low:
                    low[param] = param.to(self._dtype)
                replaced.append((module._parameters, key, param))
            if isinstance(module, nn.RNNBase):  # it also stores its parameters in a list
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
    """``Tensor.to`` with a backward that supports sparse gradients."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = param.dtype
        return param.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def check_mixed_precision(config: Any) -> None:
    """Raise a TypeError or a ValueError if ``config`` is not a valid ``mixed_precision``."""
    if not isinstance(config, MixedPrecision):
        raise TypeError(
            "mixed_precision should be a torch.nn.parallel.distributed._MixedPrecision, got "
            f"{type(config).__name__}"
        )
    wire_dtype = config.reduce_dtype or config.param_dtype
    if wire_dtype is not None and wire_dtype not in DTYPES:
        raise ValueError(
            f"mixed_precision would reduce gradients in {wire_dtype}, which is not supported. Set "
            f"reduce_dtype to one of {', '.join(map(str, DTYPES))}"
        )
