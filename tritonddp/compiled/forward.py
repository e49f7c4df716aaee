"""The function that torch.compile traces in place of a wrapper's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from tritonddp._torch import graph_inputs, tree_leaves, tree_map
from tritonddp.compiled import operators as operators  # graphs name them

# Attribute of a module that is replicated in place. It holds the wrapper, as ``wrapper``.
WRAPPER = "_tritonddp"


def in_one_graph(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Call ``begin_forward``, then the module. Add a hook on each parameter to the backward.

    Dynamo traces this slowly, so :func:`_complete` does everything that need not be traced.

    Raises:
        NotImplementedError: the forward of ``ddp`` cannot be traced into one graph.
    """
    traced = ddp._ddp_state.traced
    if traced.obstacle:
        raise NotImplementedError(traced.obstacle)
    has_grad = torch.is_grad_enabled()
    facts = traced.number, None, has_grad, traced.version  # _complete() may set the second
    buffers = list(ddp.module.buffers()) if ddp.forward_sync_buffers else []
    if buffers:
        started = torch.ops.tritonddp.begin_forward_with_buffers(*facts, buffers)
    else:
        started = torch.ops.tritonddp.begin_forward(*facts)
    if ddp.device_ids:
        device = torch.device(ddp.device_type, ddp.device_ids[0])

        def on_device(value: Any) -> Any:
            return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

        inputs, kwargs = tree_map(on_device, (inputs, kwargs))
    if has_grad:
        # A backward that reaches no parameter may still reach the inputs.
        for each in tree_leaves((inputs, kwargs)):
            if isinstance(each, Tensor) and each.requires_grad:
                torch.ops.tritonddp.watch_gradient(each, started, "")
    outputs = (ddp._ddp_state.call or ddp.module)(*inputs, **kwargs)
    traced.while_tracing(_complete)
    return outputs


def replicated_in_one_graph(module: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Trace a module that is replicated in place; see :func:`in_one_graph`."""
    return in_one_graph(getattr(module, WRAPPER).wrapper, *inputs, **kwargs)


def _complete(context: Any) -> None:
    """Complete the traced graph: keep forwards in order, and watch the used parameters.

    Find parameters among the inputs of the graph: dynamo would be slow to trace how a module names
    them, and unused parameters would become inputs. Autograd would call the hooks of unused
    parameters with ``None`` instead of a gradient.
    """
    started = context.get_local("started").as_proxy().node
    for node in started.graph.nodes:
        if node is started:
            break
        if node.target in operators.BEGIN:
            started.update_arg(1, node)
    # Recomputation of a checkpoint in the backward does not begin another forward.
    started.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    wrapper, _, has_grad, *_ = started.args
    if not has_grad:
        return
    inputs = graph_inputs(context)
    names = operators.names_of(int(inputs[wrapper]))
    with started.graph.inserting_after(started):
        for node, tensor in inputs.items():
            if tensor in names and tensor.requires_grad and node.users:
                facts = node, started, names[tensor]
                started.graph.call_function(torch.ops.tritonddp.watch_gradient, facts)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that dynamo compiles it only as part of a compiled caller."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def unless_traced(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``function``, a hook of all modules, so that it does nothing while dynamo traces."""

    def call(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            function(*args)

    return call
