"""A forward of the wrapper: as Python runs it, and as torch.compile traces it into one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from tritonddp.compiled import operators as operators  # graphs name them


def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Run the module, with inputs moved to its device if ``device_ids`` was given.

    Raises:
        NotImplementedError: a parameter was added that cannot be reduced.
        RuntimeError: in strict mode, with gradients, the last backward left parameters unused,
            or it waits for :meth:`finalize_backward`; the ranks did not reduce the same, or one
            of them is gone; or inside ``torch.distributed.autograd.context()``, what the user
            has asked for cannot be had there.
    """
    if is_dynamo_compiling():
        return in_one_graph(self, inputs, kwargs)
    return self._run_in_python(*inputs, **kwargs)


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


def in_one_graph(ddp: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is traced: the module, on marked parameters, behind ``begin_forward``.

    Where not all of it can be, dynamo leaves all of it to Python, and compiles the module alone.
    """
    if not is_dynamo_compiling():
        return ddp._run_in_python(*inputs, **kwargs)
    if obstacle := _obstacle(ddp):
        torch._dynamo.graph_break(obstacle)
    has_grad, number = torch.is_grad_enabled(), ddp.traced.number
    written = [ddp.traced.forwards]
    if ddp.forward_sync_buffers:
        written += ddp.module.buffers()
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


def _obstacle(ddp: Any) -> str:
    """Why no graph can hold a forward of ``ddp``, and what to do; empty if one can."""
    if ddp.mixed_precision is not None:
        return (
            "tritonddp: mixed_precision casts parameters before each forward, which no graph can "
            "hold: compile the module and wrap what that returns, or use torch.autocast"
        )
    if ddp._buffer_hook is not None and ddp._buffer_hook_is_after:
        return (
            "tritonddp: a hook for buffers runs after each forward, which no graph can hold: "
            "compile the module and wrap what that returns"
        )
    return ""


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _marked(value: Any, started: Tensor, number: int) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        return Mark.apply(value, started, "", number)
    return value
