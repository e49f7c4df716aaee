"""Find out which parameters a backward will reach, as far as the autograd engine knows."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from sys import _current_frames, _getframe
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._modes import outside_modes
from tritonddp._torch import (
    captures_leaves,
    current_autograd_node,
    python_function,
    will_execute,
    without_overrides,
)

# The function of torch that calls the engine. Hooks of a backward that run on the thread of the
# caller are below it in the stack.
ENGINE = "_engine_run_backward"
# The argument that holds the tensors at which the backward starts.
ROOTS = "t_outputs"


def will_engine_execute(nodes: Iterable[Any]) -> list[bool] | None:
    """Return for each autograd node whether the engine will execute it in the running backward.

    ``None`` for ``torch.autograd.grad``, which captures leaves instead of accumulating.
    """
    try:
        return list(map(will_execute, nodes))
    except RuntimeError as error:
        if captures_leaves(error):
            return None
        raise


def distributed_engine_runs() -> bool:
    """Return True if the backward on this thread belongs to ``torch.distributed.autograd``.

    That engine does not record which nodes are in the graph. So torch either does not know the
    current node, or reports that this node will not run.
    """
    node = current_autograd_node()
    return node is None or will_engine_execute([node]) == [False]


class _Joined(torch.autograd.Function):
    """A function whose node links to the nodes of all its inputs."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> Tensor:
        return torch.empty((), device="cpu")


# The base class's apply: Function.apply checks each input for dead torch.func wrappers, which
# parameters never are, and takes twice as long.
_join = super(torch.autograd.Function, _Joined).apply


def gradient_nodes(params: Sequence[Tensor]) -> list[Any]:
    """Return the autograd node that receives each parameter's gradient; ``None`` if frozen.

    Like ``torch.autograd.graph.get_gradient_edge``, but ten times as fast. That function also
    returns the node of a view for a parameter of a tensor subclass.
    """
    # Under inference_mode there are no nodes.
    with outside_modes(params), torch.enable_grad(), without_overrides():
        joined = _join(*params)  # until torch 2.10 a node loses its inputs when its output dies
        node = joined.grad_fn
    return [None] * len(params) if node is None else [each for each, _ in node.next_functions]


def accumulating_nodes(params: Sequence[Parameter]) -> list[Any]:
    """Return the AccumulateGrad node of each parameter; raise a RuntimeError if one has none."""
    nodes = gradient_nodes(params)
    for node, param in zip(nodes, params, strict=True):
        if getattr(node, "variable", None) is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} and type {type(param).__name__} cannot "
                "be synchronized: it does not accumulate gradients (its autograd node is "
                f"{node.name()})"
            )
    return nodes


@contextmanager
def as_trainable(params: Iterable[Parameter]) -> Iterator[None]:
    """Context in which hooks can be registered on these parameters, even on frozen ones."""
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def is_of_others(params: Sequence[Parameter]) -> bool:
    """Return True if the running backward, which reaches none of ``params``, is not the wrapper's.

    This is true for ``torch.autograd.grad`` and for ``backward(inputs=...)`` with respect to other
    tensors: then the graph contains parameters that will not be reached. Otherwise the backward
    uses no parameter on this rank, and ranks that use some parameters wait for it.
    """
    node = current_autograd_node()
    if not accumulates():
        return True
    if not any(param.requires_grad for param in params):
        return False
    # Do not use the nodes that hold our hooks: converting ``.data`` and back creates new nodes.
    ends = {each for each in gradient_nodes(params) if each is not None}
    return not any(will_engine_execute(ends) or ()) and any(n in ends for n in _behind([node]))


def accumulates() -> bool:
    """Return True if the running backward on this thread accumulates into leaves.

    True for ``backward()``. False for ``torch.autograd.grad``, which runs no AccumulateGrad node.
    Follow one path of the graph from the running node to its first leaf.
    """
    node = current_autograd_node()
    while True:
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if not parents:
            return bool(will_engine_execute([node]))
        leaves = [parent for parent in parents if hasattr(parent, "variable")]
        if leaves:
            return any(will_engine_execute(leaves) or ())
        node = parents[0]


def outer_call(is_on_gpu: bool) -> int:
    """Return the ID of the outermost backward call on this thread; 0 if it is the running one.

    They differ inside a reentrant checkpoint, or inside another function with an inner backward.
    On a GPU the device thread runs hooks, and the outermost call is on another thread.
    """
    calls, outermost, frame = int(is_on_gpu), 0, cast("FrameType | None", _getframe())
    while frame is not None:
        if frame.f_code.co_name == ENGINE:
            calls, outermost = calls + 1, id(frame)
        frame = frame.f_back
    return outermost if calls > 1 else 0


def _behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield these nodes and all nodes that the graph reaches from them."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)


def _nodes_of_callers() -> Iterator[Any]:
    """Yield the root nodes of the running backwards, on all threads, if Python called them.

    All threads, since two backwards may run at the same time, and a hook on a GPU does not know to
    which one it belongs.
    """
    frame: FrameType | None
    called: FrameType | None
    for called in _current_frames().values():
        frame = called
        while frame is not None:
            if frame.f_code.co_name == ENGINE:
                for root in frame.f_locals.get(ROOTS, ()):  # a tensor, or an edge of the graph
                    node = getattr(root, "node", None) or root.grad_fn
                    if node is not None:
                        yield node
            frame = frame.f_back
    called = None  # the frame of this call is among them; it would keep itself and the roots alive


def may_run_inner_backward() -> bool:
    """Return True if a node of the running backward may run another backward. Walk the graph.

    Reentrant checkpoints do so. Such nodes are Python functions whose backward calls something
    whose name starts with "backward" (``torch.autograd.backward``, ``loss.backward``,
    ``block.backward_pass``), directly or through other functions of its module. A function whose
    code cannot be read counts, too.
    """
    kinds = {type(node) for node in _behind([current_autograd_node(), *_nodes_of_callers()])}
    functions = filter(None, map(python_function, kinds))
    seen: set[Any] = set()
    return any(
        _calls_backward(each.backward, seen) or _calls_backward(each.vjp, seen)
        for each in functions
    )


def _calls_backward(function: Any, seen: set[Any]) -> bool:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    seen.add(function)
    names = list(_names_in(code))
    if any(name.startswith("backward") for name in names):
        return True
    found = (function.__globals__.get(name) for name in names)
    others = [each for each in found if isinstance(each, FunctionType) and each not in seen]
    return any(
        _calls_backward(each, seen) for each in others if each.__module__ == function.__module__
    )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)
