"""The operators of a compiled graph that tell the wrapper what the graph does.

``begin_forward`` is the first of a forward graph: all that the wrapper does before a forward.
``gradient_ready`` is in the backward graph, once for each parameter, directly behind what makes its
gradient: ``watch_gradient`` puts it there while the graph is traced. None of them computes
anything: gradients are outputs of the graph, and go through autograd into ``.grad`` as they would
without.

A graph holds names of parameters. It knows nothing of buckets, which may change, of ranks, or of
the wrapper: what it is told in ``begin_forward`` says whose forward it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tritonddp._torch import (
    current_graph_task_id,
    is_traced,
    keep_dynamo_out,
    keep_operator,
    keep_order,
)
from tritonddp.compiled.gradients import GraphGradients

_numbers = count()
_traced: WeakValueDictionary[int, Traced] = WeakValueDictionary()

_library = torch.library.Library("tritonddp", "DEF")

_INSIDE = "which no graph can hold: compile the module, and wrap what that returns"
_CASTS = f"mixed_precision casts parameters before each forward, {_INSIDE}, or use torch.autocast"
_OVERRIDES = f"a subclass of the wrapper overrides {{}}(), {_INSIDE}"
BUFFERS_AFTER = f"a hook for buffers runs after each forward, {_INSIDE}"
# What a forward that is not traced calls, and subclasses may override.
_STEPS = ("_pre_forward", "_run_ddp_forward", "_post_forward")


class Traced:
    """What the graphs of a wrapper know it by.

    Args:
        wrapper: whose.
        begin: what it does before each forward.

    Attributes:
        state: int64 ``(2,)`` on the CPU: a number for the wrapper, and how many forwards its graphs
            have begun. That each changes it keeps those of one graph apart, and in order.
        gradients: of its backwards, once a graph has run.
        obstacle: why no graph can hold its forward, and what to do; empty if one can.
    """

    def __init__(self, wrapper: Any, begin: Callable[..., Any]) -> None:
        _prepare_tracing()
        self._wrapper: Callable[[], Any] = weakref.ref(wrapper)
        self._begin: Callable[[], Any] = weakref.WeakMethod(begin)
        self.obstacle = "" if wrapper.mixed_precision is None else _CASTS
        for name in _STEPS:
            if sum(name in vars(each) for each in type(wrapper).__mro__) > 1:
                self.obstacle = _OVERRIDES.format(name)
        number = next(_numbers)
        self.state = torch.tensor([number, 0], device="cpu")
        self.gradients: GraphGradients | None = None
        _traced[number] = self

    def buffers(self) -> Sequence[Tensor]:
        """Those that :meth:`begin_forward` may overwrite."""
        ddp = self._wrapper()
        return list(ddp.module.buffers()) if ddp.forward_sync_buffers else []

    def begin_forward(self) -> int:
        """All that the wrapper does before a forward; returns its number, -1 without gradients."""
        ddp = self._wrapper()
        core, has_grad, syncs = ddp.core, torch.is_grad_enabled(), ddp.sync.enabled
        if self.gradients is None:
            self.gradients = GraphGradients(core)
            core.events.install(self.gradients)
        self._begin()()
        if (sampler := ddp.logger.sampler).moments is not None:
            sampler.forward_ended()
        ddp.require_forward_param_sync = has_grad and syncs
        if not has_grad:
            return -1
        return self.gradients.begin_forward(core.forwards.ended(core.counters.reductions, syncs))


def _begin_forward(written: list[Tensor], has_grad: bool) -> Tensor:
    """What comes before a forward, see :meth:`Traced.begin_forward`.

    Args:
        written: :attr:`Traced.state`, and the buffers of the module, which are overwritten where
            another rank's are to be taken over.
        has_grad: the forward is traced with gradients.

    Returns:
        The numbers of the wrapper and of this forward, int64 ``(2,)`` on the CPU.
    """
    state, *buffers = written
    state[1] += 1
    wrapper = int(state[0])
    traced = _traced[wrapper]
    with torch.set_grad_enabled(has_grad):
        number = traced.begin_forward()
    # Graphs may hand over copies, and bring them home at their end.
    for copy, buffer in zip(buffers, traced.buffers(), strict=True):
        if copy.data_ptr() != buffer.data_ptr():
            copy.copy_(buffer)
    return torch.tensor([wrapper, number])


def _watch_gradient(param: Tensor, forward: Tensor, name: str) -> None:
    """Put ``gradient_ready`` into the backward of the graph that is traced, if one is.

    Args:
        param: of the module, or an input.
        forward, name: see :func:`_gradient_ready`.
    """
    if is_traced(param) and param.requires_grad:
        ready = torch.ops.tritonddp.gradient_ready
        keep_order(ready.default)
        param.register_hook(lambda grad: ready(grad, forward, name))


def _gradient_ready(grad: Tensor, forward: Tensor, name: str) -> None:
    """The gradient of parameter ``name`` is there, all of it that the graph makes.

    Args:
        grad: of that parameter, or of an input if ``name`` is empty.
        forward: what ``begin_forward`` returned.
        name: as the wrapped module has it.
    """
    if current_graph_task_id() < 0:  # a constant, which the graph of the forward has too
        return
    wrapper, number = forward.tolist()
    traced = _traced.get(wrapper)
    if traced is not None and traced.gradients is not None:
        traced.gradients.ready(name, grad, number)


# Python runs in each step: no CUDA graph may hold them.
_TAGS = (torch.Tag.cudagraph_unsafe,)
for _schema, _function, _fake in (
    (
        "begin_forward(Tensor(a!)[] written, bool has_grad) -> Tensor",
        _begin_forward,
        lambda *_: torch.empty(2, dtype=torch.int64),
    ),
    (
        "gradient_ready(Tensor grad, Tensor forward, str name) -> ()",
        _gradient_ready,
        lambda *_: None,
    ),
    (
        "watch_gradient(Tensor param, Tensor forward, str name) -> ()",
        lambda *_: None,
        lambda *_: None,
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=_TAGS)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tritonddp::{_name}", _fake)
_library.impl("watch_gradient", _watch_gradient, "Autograd")


@functools.cache
def _prepare_tracing() -> None:
    """Let graphs hold these operators. (It imports what traces graphs.)"""
    keep_dynamo_out(f"{__package__}.forward")
    for each in ("begin_forward", "gradient_ready", "watch_gradient"):
        keep_operator(getattr(torch.ops.tritonddp, each).default)
