"""The operators of a compiled graph that tell the wrapper what the graph does.

``begin_forward`` is the first of a forward graph: all that the wrapper does before a forward.
``gradient_ready`` is in the backward graph, once for each parameter, directly behind what makes its
gradient. Neither computes anything: gradients are outputs of the graph, and go through autograd
into ``.grad`` as they would without.

A graph holds the number of its wrapper, and names of parameters. It knows nothing of buckets, which
may change, or of ranks.
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

from tritonddp._torch import insert_where_ready, keep_dynamo_out, keep_operator
from tritonddp.compiled.gradients import GraphGradients

_numbers = count()
_traced: WeakValueDictionary[int, Traced] = WeakValueDictionary()

_library = torch.library.Library("tritonddp", "DEF")

_INSIDE = "which no graph can hold: compile the module, and wrap what that returns"
_CASTS = f"mixed_precision casts parameters before each forward, {_INSIDE}, or use torch.autocast"
BUFFERS_AFTER = f"a hook for buffers runs after each forward, {_INSIDE}"


class Traced:
    """What the graphs of a wrapper know it by.

    Args:
        wrapper: whose.
        begin: what it does before each forward.

    Attributes:
        number: of the wrapper, alike on ranks that wrap alike.
        forwards: how many graphs have begun, int64 without dimensions, on the CPU. That each
            changes it keeps forwards of one graph apart, and in order.
        gradients: of its backwards, once a graph has run.
        obstacle: why no graph can hold its forward, and what to do; empty if one can.
    """

    def __init__(self, wrapper: Any, begin: Callable[..., Any]) -> None:
        _prepare_tracing()
        self._wrapper: Callable[[], Any] = weakref.ref(wrapper)
        self._begin: Callable[[], Any] = weakref.WeakMethod(begin)
        self.obstacle = "" if wrapper.mixed_precision is None else _CASTS
        self.number = next(_numbers)
        self.forwards = torch.zeros((), dtype=torch.int64, device="cpu")
        self.gradients: GraphGradients | None = None
        _traced[self.number] = self

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


def _begin_forward(written: list[Tensor], wrapper: int, has_grad: bool) -> Tensor:
    """What comes before a forward, see :meth:`Traced.begin_forward`.

    Args:
        written: :attr:`Traced.forwards`, and the buffers of the module, which are overwritten where
            another rank's are to be taken over.
        wrapper: its number.
        has_grad: the forward is traced with gradients.

    Returns:
        The number of this forward, int64 without dimensions, on the CPU.
    """
    written[0].add_(1)
    traced = _traced[wrapper]
    with torch.set_grad_enabled(has_grad):
        number = traced.begin_forward()
    # Graphs may hand over copies, and bring them home at their end.
    for copy, buffer in zip(written[1:], traced.buffers(), strict=True):
        if copy.data_ptr() != buffer.data_ptr():
            copy.copy_(buffer)
    return torch.tensor(number)


def _gradient_ready(grad: Tensor, forward: Tensor, name: str, wrapper: int) -> None:
    """The gradient of parameter ``name`` is there, all of it that the graph makes.

    Args:
        grad: of that parameter, or of an input if ``name`` is empty.
        forward: what ``begin_forward`` returned.
        name: as the wrapped module has it.
        wrapper: its number.
    """
    traced = _traced.get(wrapper)
    if traced is not None and traced.gradients is not None:
        traced.gradients.ready(name, grad, int(forward))


def _gradient_traced(grad: Tensor, param: Tensor, forward: Tensor, name: str, wrapper: int) -> None:
    """Of a backward that is not traced further: its gradients go to autograd at once."""
    traced = _traced.get(wrapper)
    if traced is not None and traced.gradients is not None:
        traced.gradients.begin_backward(int(forward))


# Python runs in each step: no CUDA graph may hold them.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_TENSOR_AND_PLACE = "Tensor forward, str name, int wrapper) -> ()"
_library.define(
    "begin_forward(Tensor(a!)[] written, int wrapper, bool has_grad) -> Tensor", tags=_TAGS
)
_library.define(f"gradient_ready(Tensor grad, {_TENSOR_AND_PLACE}", tags=_TAGS)
# In the place of gradient_ready while a graph is traced: the parameter tells whether the graph uses
# it in other ways too. Then that would not be all of its gradient, and there is no operator.
_library.define(f"gradient_traced(Tensor grad, Tensor param, {_TENSOR_AND_PLACE}", tags=_TAGS)

for _name, _function, _fake in (
    ("begin_forward", _begin_forward, lambda *_: torch.empty((), dtype=torch.int64)),
    ("gradient_ready", _gradient_ready, lambda *_: None),
    ("gradient_traced", _gradient_traced, lambda *_: None),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tritonddp::{_name}", _fake)


@functools.cache
def _prepare_tracing() -> None:
    """Let graphs hold these operators. (It imports what traces graphs.)"""
    keep_dynamo_out(f"{__package__}.forward")
    keep_operator(torch.ops.tritonddp.begin_forward.default)
    insert_where_ready(
        torch.ops.tritonddp.gradient_traced.default, torch.ops.tritonddp.gradient_ready.default
    )
