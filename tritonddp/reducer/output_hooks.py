"""Where a backward of the module begins (hooks on what its forward returned), and where it ends."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook

from tritonddp._device import is_capturing
from tritonddp._torch import backward_hooks_of, queue_end_of_backward, tree_leaves
from tritonddp.coordination.failures import listed
from tritonddp.reducer.extension import SyncState

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer


logger = logging.getLogger("tritonddp.in_step")


@dataclasses.dataclass(eq=False, slots=True)
class Forward:
    """One forward of the module, as long as its graph lives."""

    number: int  # counts the forwards of this wrapper
    reductions: int  # number of reductions before it
    syncs: bool  # it ran outside no_sync, so that backwards through its outputs may be reduced
    reached: bool = False  # a reduced backward has gone through its outputs


class Forwards:
    """Decides, from the forwards until now, whether a backward is reduced or only accumulates.

    A *local* backward only accumulates. As in stock DDP, a forward outside ``no_sync`` arms the
    reduction: the next backward is reduced, whichever outputs it goes through, and disarms it.
    While the reduction is not armed, a backward is reduced if it goes through an output of a
    forward that ran outside ``no_sync``. All others are local: those of forwards inside
    ``no_sync``, and those that go through no forward of the wrapper at all. Unlike in stock, a
    backward that starts inside ``no_sync`` is local in any case.

    The decision does not depend on the order in which autograd runs hooks, which differs between
    ranks that use different parameters: a backward that is local so far, and then goes through such
    an output, is reduced from there on (``Reducer._reduce_after_all``).
    """

    def __init__(self) -> None:
        self._number = 0
        self._prepared = 0  # the last forward whose next backward is reduced, also inside no_sync
        self._is_armed = False
        self.was_local = False  # the last forward ran inside no_sync, and had no backward yet

    def ended(self, reductions: int, syncs: bool) -> Forward:
        """A forward has run; see :class:`Forward`."""
        self._number += 1
        self._is_armed = self._is_armed or syncs
        self.was_local = not syncs
        return Forward(self._number, reductions, syncs)

    def prepare(self) -> None:
        """Reduce the next backward, also that of a forward that ran under ``no_sync``."""
        self._is_armed = True
        self._prepared = self._number

    def decide(self, forward: Forward | None, sync: SyncState, where: Callable[[], str]) -> bool:
        """A backward begins: is it reduced, or does it only accumulate?

        ``forward`` is ``None`` if the backward has gone through no output so far. Inside ``join()``
        the ranks decide together.
        """
        join = sync.join
        is_joined = join is not None and join.is_open
        number = self._number if forward is None else forward.number
        # (Inside join() ranks without inputs know only what the forward has told them.)
        if is_joined:
            is_wanted = forward is None or forward.syncs
        else:
            is_wanted = self._is_armed or (forward is not None and forward.syncs)
        if 0 < number <= self._prepared and not is_joined:
            reduced = True
        elif not is_wanted:
            reduced = False
        else:
            reduced = sync.enabled if join is None else join.reduces_backward(sync.enabled, where())
        self.was_local, self._prepared = False, 0
        self._is_armed = self._is_armed and not reduced
        return reduced

    def reduction_begins(self) -> None:
        """A reduction on request begins: it disarms all forwards until now."""
        self.was_local, self._prepared, self._is_armed = False, 0, False


_AROUND = (
    "a backward that went through no forward of the wrapped module (a call of .module, of a method "
    "or of a submodule is none), which stays on its rank, as in stock DDP. If that was not meant, "
    "call the wrapper itself, or reduce_gradients() after the backward. If it was, drop the "
    "gradients by zero_grad() before others use them, or let this be"
)
_INSIDE = (
    "a backward that started inside no_sync(), and none was reduced after it. (Stock DDP reduces "
    "it, if its forward ran outside.) Run the last backward before a step outside no_sync()"
)


class UnreducedGradient(NamedTuple):
    """A gradient that a backward has left on its rank, though perhaps it should not.

    Such are backwards that went through no forward of the wrapper: stock DDP leaves them alone
    without a word, and whoever trains through ``.module`` by mistake trains each rank by itself.
    And backwards inside ``no_sync`` of a forward outside, which stock reduces. So it is said once
    for each wrapper, when an optimizer, or for the former the wrapper's next reduced backward,
    finds such a gradient. Nothing is said of gradients that were dropped, zeroed or reduced before.

    Attributes:
        param, grad: the parameter, and the gradient that was left.
        name, where: the parameter's name; the rank and its step.
        origin: ``_AROUND`` or ``_INSIDE``.
        reducer: of the wrapper.
    """

    param: weakref.ref[Tensor]
    grad: weakref.ref[Tensor]
    name: str
    where: str
    origin: str
    reducer: weakref.ref[Reducer]

    def is_left(self) -> bool:
        """Whether the parameter still has this gradient, and that is not zero."""
        param = self.param()
        grad = None if param is None else param.grad
        if grad is None or self.grad() is not grad or (grad.is_cuda and is_capturing()):
            return False
        return grad.is_sparse or bool(grad.any())


# Of all wrappers in this process, by the id of the parameter. Empty unless there are some.
unreduced: dict[int, UnreducedGradient] = {}
# The hook of all optimizers that looks for them, once there was one. (It cannot be removed: an
# optimizer of another thread may be iterating over the hooks.)
_hooks: list[Any] = []


def note_unreduced(
    reducer: Reducer, named_params: Iterable[tuple[str, Tensor]], where: str, is_inside: bool
) -> None:
    """A backward has left gradients in these parameters of ``reducer``.

    Args:
        where: this rank and step.
        is_inside: it started inside ``no_sync``.
    """
    if reducer.has_told_of_unreduced:
        return
    origin = _INSIDE if is_inside else _AROUND
    for name, param in named_params:
        if param.grad is not None:
            unreduced[id(param)] = UnreducedGradient(
                *(weakref.ref(param), weakref.ref(param.grad), name, where, origin),
                reducer.reference,
            )
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def tell_unreduced(reducer: Reducer) -> None:
    """A reduced backward of ``reducer`` begins: say which of its gradients it should not find."""
    found = [unreduced[id(p)] for p in reducer.manager.current.params if id(p) in unreduced]
    around = [each for each in found if each.reducer() is reducer and each.origin is _AROUND]
    _tell_of(around, "a reduced backward")
    forget_unreduced(reducer)


def forget_unreduced(reducer: Reducer) -> None:
    """All gradients of the parameters of ``reducer`` are reduced."""
    for param in reducer.manager.current.params:
        unreduced.pop(id(param), None)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Hook of all optimizers."""
    if unreduced:
        params = [id(param) for group in optimizer.param_groups for param in group["params"]]
        found = [unreduced[key] for key in params if key in unreduced]
        _tell_of(found, "an optimizer")
        for key in params:
            unreduced.pop(key, None)
        for key, each in list(unreduced.items()):
            if each.param() is None or each.reducer() is None:
                unreduced.pop(key, None)


def _tell_of(found: Sequence[UnreducedGradient], who: str) -> None:
    """``who`` uses these gradients now, if they are left: say it, once for each wrapper."""
    left = [each for each in found if each.is_left()]
    for first in left:
        reducer = first.reducer()
        if reducer is None or reducer.has_told_of_unreduced:
            continue
        reducer.has_told_of_unreduced = True
        names = [each.name for each in left if each.reducer is first.reducer]
        logger.warning(
            "%s: %s finds gradients that are not averaged over the ranks, those of %s. They come "
            "from %s. It is said once",
            *(first.where, who, listed(names), first.origin),
        )


class EndsOfBackward:
    """The ends of all wrappers in one backward: all have launched when the first one waits.

    So two wrappers may be used in another order on each rank. The first end queues :meth:`finish`
    behind all callbacks that the engine has by then; only the engine holds this object. Waiting
    makes collectives of its own at times (a new order of gradients, for example), which block. So
    reductions are finished in an order that is the same on all ranks: by the name of the process
    group, which ``new_group`` gives, and the number of the wrapper in it.

    Attributes:
        reducers: their backward is over, and their reductions are launched.
        local: of local backwards whose gradients :func:`note_unreduced` notes: its arguments.
    """

    def __init__(self) -> None:
        self.reducers: list[Reducer] = []
        self.local: list[tuple[Reducer, list[tuple[str, Parameter]], str, bool]] = []

    @classmethod
    def of(cls, graph_task: int) -> EndsOfBackward:
        """That of the backward with this id, which is called by its end."""
        found = _ends.get(graph_task)
        if found is None:
            found = _ends[graph_task] = cls()
            queue_end_of_backward(partial(cls.finish, found))
        return found

    def finish(self) -> None:
        """Wait for all reductions. An error of one does not keep the others from their end."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.finish()
        waiting = self.reducers
        if self.local:
            self._note_unreduced()
        failure: Exception | None = None
        if len(waiting) > 1:
            waiting.sort(key=lambda each: (each.group.name, each.parameters.number))
            failure = _shared_views(waiting)
        while waiting:
            reducer = waiting.pop(0)  # what Ctrl-C leaves is made up for
            try:
                if reducer.run is not None and reducer.run.is_ended:
                    reducer.finish(reducer.run)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _note_unreduced(self) -> None:
        """Note gradients that no wrapper reduces."""
        reduced = {param for each in self.reducers for param in each.manager.current.params}
        for reducer, left, where, is_inside in self.local:
            named = [each for each in left if each[1] not in reduced]
            note_unreduced(reducer, named, where, is_inside)
        self.local = []


# Of backwards that have ended, by id.
_ends: weakref.WeakValueDictionary[int, EndsOfBackward] = weakref.WeakValueDictionary()


def _shared_views(reducers: Sequence[Reducer]) -> RuntimeError | None:
    """The error if a gradient would have to be a view of the buckets of two wrappers.

    The second one has taken the gradient, divided already, from the bucket of the first. (In
    backwards of their own such wrappers are right.)
    """
    sets = [each.manager.current for each in reducers]
    names: dict[Tensor, str] = {}
    if any(each.buckets[0].has_views for each in sets):
        for each in sets:
            for name, param in zip(each.names, each.params, strict=True):
                if param in names:
                    return RuntimeError(
                        f"{reducers[0].where()}: this backward is reduced by two wrapped modules "
                        f"that hold {names[param]!r} both, one of them with "
                        "gradient_as_bucket_view=True: .grad is not the mean, as it would have to "
                        "be a view of the buckets of both. Leave the option off, or make two "
                        "backwards"
                    )
                names[param] = name
    return None


def watch(reducer: Reducer, outputs: Iterable[Tensor], syncs: bool = True) -> None:
    """Notice the start of each backward through one of these tensors, which a forward returned.

    The hook of the first gradient alone would not do: a backward that reaches no parameter of this
    rank must take part too, and a backward that starts with a reentrant checkpoint must be noticed
    before its inner backward. An output may outlive the reducer.

    Args:
        reducer: its ``on_backward`` is called.
        outputs: of the forward.
        syncs: the forward ran outside ``no_sync``.
    """
    forward = reducer.forwards.ended(reducer.counters.reductions, syncs)
    reference = reducer.reference
    for output in outputs:
        if output.grad_fn is None:
            continue
        hooks = backward_hooks_of(output)
        # A tensor that the module passes through may live long: it gets one hook only.
        if hooks and any(
            isinstance(hook, partial) and hook.func is tell and hook.args[0] is reference
            for hook in hooks.values()
        ):
            continue
        output.register_hook(unserializable_hook(partial(tell, reference, forward)))


def tell(reducer: weakref.ref[Reducer], forward: Forward | None, _: Tensor) -> None:
    """The hook: a gradient has come, through an output of ``forward`` or elsewhere."""
    told = reducer()
    if told is not None:
        told.on_backward(forward)


# Types of values that hold no tensor.
_PLAIN = frozenset({NoneType, bool, bytes, float, int, str})


def tensors_in(output: Any) -> list[Tensor]:
    """Tensors in any nesting of containers, dataclasses and types known to pytree."""
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}  # a container may hold itself
    stack = [output]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            if not _PLAIN.issuperset(map(type, item)):  # a long list of numbers costs little
                stack.extend(item)
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
        else:
            stack.extend(tree_leaves(item))
    return tensors
