"""The operators with which a compiled graph calls the wrapper.

``begin_forward`` is the first operator of a forward graph. It does everything that precedes a
forward in the wrapper. If this overwrites buffers, the operator is ``begin_forward_with_buffers``,
which costs more: torch looks up in each step how an operator changes its arguments.
``gradient_ready`` is in the backward graph, once for each parameter, directly after the operator
that computes its gradient. ``watch_gradient`` puts it there while the graph is traced. None of them
computes anything: gradients are outputs of the graph, and autograd sets ``.grad`` as usual. Before
``gradient_ready``, ``to_contiguous`` copies the gradient of a convolution's weight.

A graph holds parameter names. It does not depend on buckets, which may change, on ranks, or on the
wrapper: ``begin_forward`` returns the number of the wrapper.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tritonddp._modes import outside_modes
from tritonddp._torch import comptime, current_graph_task_id, is_traced, keep_dynamo_out, keep_order
from tritonddp.compiled.gradients import GraphGradients

_numbers = count()
_traced: WeakValueDictionary[int, Traced] = WeakValueDictionary()

_library = torch.library.Library("tritonddp", "DEF")

_INSIDE = "which cannot be compiled into one graph: compile the module first, then wrap the result"
_CASTS = (
    "mixed_precision casts parameters before each forward, which cannot be compiled into one "
    "graph: use torch.autocast instead"
)
_OVERRIDES = f"a subclass of the wrapper overrides {{}}(), {_INSIDE}"
_VIEWS = (
    f"buffers that share memory are overwritten before each forward, {_INSIDE}, or wrap it with "
    "forward_sync_buffers=False"
)
_BUFFERS_AFTER = f"a buffer hook runs after each forward, {_INSIDE}"
# Methods that an untraced forward calls, and that subclasses may override.
_STEPS = ("_pre_forward", "_run_ddp_forward", "_post_forward")


class Traced:
    """The state of a wrapper that its graphs use.

    Args:
        begin: function that does the wrapper's work before each forward.

    Attributes:
        version: version of this package. torch caches graphs on disk, also those of older versions.
        obstacle: why the forward cannot be traced into one graph, and the remedy; empty if it can.
    """

    def __init__(self, wrapper: Any, begin: Callable[..., Any]) -> None:
        self.while_tracing = _prepare_tracing()  # calls its argument while a forward is traced
        self.version = sys.modules[__package__.partition(".")[0]].__version__
        self._wrapper: Callable[[], Any] = weakref.ref(wrapper)
        self._begin: Callable[[], Any] = weakref.WeakMethod(begin)
        self.obstacle = "" if wrapper._ddp_state.low_precision is None else _CASTS
        if wrapper.forward_sync_buffers and _overlap(wrapper.module.buffers()):
            self.obstacle = _VIEWS
        for name in _STEPS:
            if sum(name in vars(each) for each in type(wrapper).__mro__) > 1:
                self.obstacle = _OVERRIDES.format(name)
        number = next(_numbers)
        with outside_modes():
            self.number = torch.tensor(number, device="cpu")  # number of the wrapper
        self.gradients: GraphGradients | None = None  # receives announcements once a graph has run
        _traced[number] = self

    def refuse_buffers_after(self) -> None:
        """Refuse to trace forwards, because a buffer hook runs after each forward."""
        self.obstacle = _BUFFERS_AFTER

    def buffers(self) -> Sequence[Tensor]:
        """Return the buffers that :meth:`begin_forward` may overwrite."""
        ddp = self._wrapper()
        return list(ddp.module.buffers()) if ddp.forward_sync_buffers else []

    def begin_forward(self) -> int:
        """Do the wrapper's work before a forward. Return its number, -1 without gradients."""
        ddp = self._wrapper()
        state = ddp._ddp_state
        core, has_grad, syncs = state.core, torch.is_grad_enabled(), state.sync.enabled
        if self.gradients is None:
            self.gradients = GraphGradients(core)
            core.events.install(self.gradients)
        self._begin()()
        if (sampler := state.logger.sampler).moments is not None:
            sampler.forward_ended()
        ddp.require_forward_param_sync = has_grad and syncs
        if not has_grad:
            return -1
        return self.gradients.begin_forward(core.forwards.ended(state.counters.reductions, syncs))


def names_of(number: int) -> dict[Tensor, str]:
    """Return the names of the parameters of the wrapper with this number."""
    ddp = _traced[number]._wrapper()
    return {param: name for name, param in ddp._ddp_state.ignored.parameters(ddp.module)}


def _overlap(tensors: Iterable[Tensor]) -> bool:
    """Return True if two of these tensors share memory. No graph can overwrite such views."""
    ranges = []
    for each in tensors:
        is_odd = is_lazy(each) or each.is_nested or each.layout is not torch.strided
        if not is_odd and each.numel():
            last = sum((n - 1) * s for n, s in zip(each.shape, each.stride(), strict=True))
            ranges.append((each.data_ptr(), each.data_ptr() + (last + 1) * each.element_size()))
    return any(first[1] > second[0] for first, second in pairwise(sorted(ranges)))


def _begin_forward(
    wrapper: Tensor,
    after: Tensor | None,
    has_grad: bool,
    version: str,
    buffers: Sequence[Tensor] = (),
) -> Tensor:
    """Do the wrapper's work before a forward; see :meth:`Traced.begin_forward`.

    Args:
        wrapper: :attr:`Traced.number`.
        after: result for the previous forward in the same graph, so that torch.compile neither
            merges nor reorders them.
        has_grad: the forward is traced with gradients.
        version: see :attr:`Traced.version`.
        buffers: buffers of the module, which another rank's buffers may overwrite.

    Returns:
        The numbers of the wrapper and of this forward, int64 ``(2,)`` on the CPU.
    """
    number = int(wrapper)
    traced = _traced[number]
    with torch.set_grad_enabled(has_grad):
        forward = traced.begin_forward()
    # Graphs may pass copies of the buffers, and write them back at their end.
    for copy, buffer in zip(buffers, traced.buffers(), strict=True):
        if copy.data_ptr() != buffer.data_ptr():
            copy.copy_(buffer)
    return torch.tensor([number, forward], device="cpu")


def _watch_gradient(param: Tensor, forward: Tensor, name: str) -> None:
    """Put ``gradient_ready`` into the backward of the graph that is being traced, if any.

    ``param`` is a parameter of the module or an input.
    """
    if not is_traced(param) or not param.requires_grad:
        return
    ready, copy = torch.ops.tritonddp.gradient_ready, torch.ops.tritonddp.to_contiguous
    keep_order(ready.default)
    is_copied = bool(name) and _may_come_in_channels_last(param)

    def on_gradient(grad: Tensor) -> Tensor:
        grad = copy(grad) if is_copied else grad
        ready(grad, forward, name)
        return grad

    param.register_hook(on_gradient)


def _may_come_in_channels_last(param: Tensor) -> bool:
    """Return True if Inductor may compute the gradient of ``param`` in another memory order.

    Inductor computes convolutions in channels_last. If the order of a gradient differs from the
    order of its parameter, autograd copies it after the whole graph has run, so it could not be
    sent earlier.
    """
    if param.dim() not in (4, 5):
        return False
    order = torch.channels_last if param.dim() == 4 else torch.channels_last_3d
    return param.is_contiguous() and not param.is_contiguous(memory_format=order)


def _to_contiguous(grad: Tensor) -> Tensor:
    """Copy ``grad`` in row-major order; Inductor would choose the order of ``aten.clone``."""
    return grad.clone(memory_format=torch.contiguous_format)


def _gradient_ready(grad: Tensor, forward: Tensor, name: str) -> None:
    """Announce that the graph has computed the whole gradient of parameter ``name``.

    Args:
        grad: the gradient of that parameter, or of an input if ``name`` is empty.
        forward: the result of ``begin_forward``.
        name: name of the parameter in the wrapped module.
    """
    if current_graph_task_id() < 0:  # in a forward, which computes constant gradients
        return
    wrapper, number = forward.tolist()
    traced = _traced.get(wrapper)
    if traced is not None and traced.gradients is not None:
        traced.gradients.ready(name, grad, number)


# Python code that runs in each step cannot be part of a CUDA graph.
_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_FORWARD = "Tensor wrapper, Tensor? after, bool has_grad, str version"
for _schema, _function, _fake, _tags in (
    (
        f"begin_forward({_FORWARD}) -> Tensor",
        _begin_forward,
        lambda *_: torch.empty(2, dtype=torch.int64, device="cpu"),
        _UNSAFE,
    ),
    (
        f"begin_forward_with_buffers({_FORWARD}, Tensor(a!)[] buffers) -> Tensor",
        _begin_forward,
        lambda *_: torch.empty(2, dtype=torch.int64, device="cpu"),
        _UNSAFE,
    ),
    (
        "gradient_ready(Tensor grad, Tensor forward, str name) -> ()",
        _gradient_ready,
        lambda *_: None,
        _UNSAFE,
    ),
    (
        "watch_gradient(Tensor param, Tensor forward, str name) -> ()",
        lambda *_: None,
        lambda *_: None,
        _UNSAFE,
    ),
    (
        "to_contiguous(Tensor grad) -> Tensor",
        _to_contiguous,
        _to_contiguous,
        (torch.Tag.flexible_layout,),
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=_tags)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tritonddp::{_name}", _fake)
_library.impl("watch_gradient", _watch_gradient, "Autograd")
BEGIN = torch.ops.tritonddp.begin_forward, torch.ops.tritonddp.begin_forward_with_buffers


@functools.cache
def _prepare_tracing() -> Callable[[Callable[[Any], None]], None]:
    """Make these operators traceable. Return :func:`comptime`. Imports torch's tracer."""
    keep_dynamo_out(f"{__package__}.forward")
    ops = torch.ops.tritonddp
    for each in (*BEGIN, ops.gradient_ready, ops.watch_gradient):
        # Graphs keep these operators, although nothing uses their results.
        torch.fx.has_side_effect(each.default)
    return comptime()
