"""What torch.compile traces in the place of a wrapper's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonddp._torch import tree_leaves, tree_map
from tritonddp.compiled import operators as operators  # graphs name them


def in_one_graph(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
    """The module, behind ``begin_forward``, with a hook on each parameter in its backward.

    Raises:
        NotImplementedError: no graph can hold a forward of ``ddp``.
    """
    if ddp.traced.obstacle:
        raise NotImplementedError(ddp.traced.obstacle)
    has_grad = torch.is_grad_enabled()
    written = [ddp.traced.state]
    if ddp.forward_sync_buffers:
        written.extend(ddp.module.buffers())
    started = torch.ops.tritonddp.begin_forward(written, has_grad)
    if ddp.device_ids:
        device = torch.device(ddp.device_type, ddp.device_ids[0])

        def on_device(value: Any) -> Any:
            return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

        inputs, kwargs = tree_map(on_device, (inputs, kwargs))
    if has_grad:
        for name, param in ddp.module.named_parameters():
            if param.requires_grad and name not in ddp.parameters_to_ignore:
                torch.ops.tritonddp.watch_gradient(param, started, name)
        # A backward that reaches none of them may still reach these.
        for each in tree_leaves((inputs, kwargs)):
            if isinstance(each, Tensor) and each.requires_grad:
                torch.ops.tritonddp.watch_gradient(each, started, "")
    return ddp.module(*inputs, **kwargs)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, of a file that dynamo compiles only where something compiled calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
