"""Which parameters will a backward reach? What the autograd engine can tell, and what it cannot."""

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

# The function of torch that calls the engine. Below it in the stack are the hooks of a backward, if
# they run on the thread of the caller.
ENGINE = "_engine_run_backward"
# Its argument from which the backward starts.
ROOTS = "t_outputs"


def will_engine_execute(nodes: Iterable[Any]) -> list[bool] | None:
    """For each autograd node, whether the engine will execute it in the backward that runs.

    ``None`` if that is ``torch.autograd.grad``, which captures leaves instead of accumulating.
    """
    try:
        return list(map(will_execute, nodes))
    except RuntimeError as error:
        if captures_leaves(error):
            return None
        raise


def distributed_engine_runs() -> bool:
    """Whether the backward on this thread is one of ``torch.distributed.autograd``.

    Its engine does not record which nodes are in the graph. So torch does not know the current node
    then, or reports that this node will not run.
    """
    node = current_autograd_node()
    return node is None or will_engine_execute([node]) == [False]


class _Joined(torch.autograd.Function):
    """A function whose node leads to those of all its inputs."""

    @staticmethod
    def forward(_: Any, *tensors: Tensor) -> Tensor:
        return torch.empty((), device="cpu")


# Of the base class: Function.apply looks at each input for a dead wrapper of torch.func, which
# parameters are not, and so takes twice as long.
_join = super(torch.autograd.Function, _Joined).apply


def gradient_nodes(params: Sequence[Tensor]) -> list[Any]:
    """The autograd node that the gradient of each parameter goes to; ``None`` if it is frozen.

    As ``torch.autograd.graph.get_gradient_edge``, which takes ten times as long, and returns the
    node of a view for a parameter of a tensor subclass.
    """
    # (Under inference_mode there are none.)
    with outside_modes(params), torch.enable_grad(), without_overrides():
        joined = _join(*params)  # until torch 2.10 a node knows its inputs while its output lives
        node = joined.grad_fn
    return [None] * len(params) if node is None else [each for each, _ in node.next_functions]


def accumulating_nodes(params: Sequence[Parameter]) -> list[Any]:
    """The AccumulateGrad node of each parameter; a RuntimeError if one has none."""
    nodes = gradient_nodes(params)
    for node, param in zip(nodes, params, strict=True):
        if getattr(node, "variable", None) is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} and type {type(param).__name__} "
                f"accumulates no gradients (its autograd node is {node.name()}): it cannot be "
                "synchronized"
            )
    return nodes


@contextmanager
def as_trainable(params: Iterable[Parameter]) -> Iterator[None]:
    """Context: hooks can be registered on these parameters, although some are frozen."""
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def is_of_others(params: Sequence[Parameter]) -> bool:
    """Whether the backward that runs, and reaches none of ``params``, is none of the wrapper's.

    It is so for ``torch.autograd.grad``, and for ``backward(inputs=...)``, with respect to other
    tensors: the graph then has parameters that are not reached. Otherwise it is a backward that
    uses no parameter on this rank, and ranks that use some wait for it.
    """
    node = current_autograd_node()
    if not accumulates():
        return True
    if not any(param.requires_grad for param in params):
        return False
    # Not the nodes that our hooks are on: ``.data`` of another dtype, and back, brings others.
    ends = {each for each in gradient_nodes(params) if each is not None}
    return not any(will_engine_execute(ends) or ()) and any(n in ends for n in _behind([node]))


def accumulates() -> bool:
    """Whether the backward that runs on this thread accumulates into leaves.

    True for ``backward()``, False for ``torch.autograd.grad``: that one runs no AccumulateGrad
    node. Follows one path of the graph from the node that runs to its first leaf.
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
    """Id of the outermost call of a backward on this thread; 0 if the one that runs is that.

    It is another one inside a reentrant checkpoint, or another function with an inner backward. On
    a GPU the thread of the device runs hooks, and the outermost call is on another thread.
    """
    calls, outermost, frame = int(is_on_gpu), 0, cast("FrameType | None", _getframe())
    while frame is not None:
        if frame.f_code.co_name == ENGINE:
            calls, outermost = calls + 1, id(frame)
        frame = frame.f_back
    return outermost if calls > 1 else 0


def _behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """These nodes, and all that the graph has behind them."""
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
    """The nodes at which the backwards that run begin, on all threads, as far as Python calls them.

    (Two backwards may run at the same time, and on a GPU a hook does not know which one it is of.)
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
    called = None  # the frame of this call is one of them, and would hold itself, and the roots


def may_run_inner_backward() -> bool:
    """Whether a node of the backward that runs may run a backward of its own. Walks the graph.

    As reentrant checkpoints do. Those are functions in Python whose backward calls something that
    is named after it (``torch.autograd.backward``, ``loss.backward``, ``block.backward_pass``), by
    itself or by other functions of its module. One that cannot be read may do anything.
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
