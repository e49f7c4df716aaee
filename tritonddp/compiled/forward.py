"""What torch.compile traces in the place of a wrapper's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonddp.compiled import operators as operators  # graphs name them


class Mark(torch.autograd.Function):
    """The same tensor, whose gradient is told of in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Tensor, name: str, wrapper: int) -> Tensor:
        ctx.name, ctx.wrapper = name, wrapper
        ctx.save_for_backward(tensor, forward)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensor, forward = ctx.saved_tensors
        torch.ops.tritonddp.gradient_traced(grad, tensor, forward, ctx.name, ctx.wrapper)
        return grad, None, None, None


def in_one_graph(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
    """The module, on marked parameters, behind ``begin_forward``.

    Raises:
        NotImplementedError: no graph can hold a forward of ``ddp``.
    """
    if ddp.traced.obstacle:
        raise NotImplementedError(ddp.traced.obstacle)
    has_grad, number = torch.is_grad_enabled(), ddp.traced.number
    written = [ddp.traced.forwards]
    if ddp.forward_sync_buffers:
        written.extend(ddp.module.buffers())
    started = torch.ops.tritonddp.begin_forward(written, number, has_grad)
    if ddp.device_ids:
        device = torch.device(ddp.device_type, ddp.device_ids[0])
        inputs = tuple(_on(device, each) for each in inputs)
        kwargs = {name: _on(device, each) for name, each in kwargs.items()}
    if not has_grad:
        return ddp.module(*inputs, **kwargs)
    marked = {
        name: Mark.apply(param, started, name, number)
        for name, param in ddp.module.named_parameters()
        if param.requires_grad and name not in ddp.parameters_to_ignore
    }
    # A backward that reaches none of them may still reach these.
    inputs = tuple(_marked(each, started, number) for each in inputs)
    kwargs = {name: _marked(each, started, number) for name, each in kwargs.items()}
    return torch.func.functional_call(ddp.module, marked, inputs, kwargs)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, of a file that dynamo compiles only where something compiled calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _marked(value: Any, started: Tensor, number: int) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        return Mark.apply(value, started, "", number)
    return value
