"""Where a backward of the module begins (hooks on what its forward returned), and where it ends."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
    an output, is reduced from there on (``Reducer.reduce_after_all``).
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


class UnreducedGradients:
    """Gradients left by backwards that stayed on their rank, though perhaps they should not.

    That are backwards that went through no forward of the wrapper: stock DDP leaves them alone
    without a word, and whoever trains through ``.module`` by mistake trains each rank by itself.
    And backwards inside ``no_sync`` of a forward outside, which stock reduces. So it is said once,
    when an optimizer, or for the former the next reduced backward, finds such a gradient. Nothing
    is said of gradients that were dropped or zeroed before.

    Attributes:
        found: for each parameter, its name, a weak reference to the gradient that was left, and
            where it comes from.
    """

    def __init__(self) -> None:
        self.found: dict[Tensor, tuple[str, weakref.ref[Tensor], str]] = {}
        self._hook: Any = None  # in all optimizers, while a gradient is noted
        self._is_over = False  # it was said
        self._where = ""

    def note(self, named_params: Iterable[tuple[str, Tensor]], where: str, is_inside: bool) -> None:
        """A backward has left gradients in these parameters.

        Args:
            where: this rank and step.
            is_inside: it started inside ``no_sync``.
        """
        while _spent_hooks:
            _spent_hooks.pop().remove()
        if self._is_over:
            return
        for name, param in named_params:
            if param.grad is not None:
                origin = _INSIDE if is_inside else _AROUND
                self.found[param] = name, weakref.ref(param.grad), origin
        self._where = where
        if self.found and self._hook is None:
            look = partial(_before_step, weakref.ref(self))
            self._hook = register_optimizer_step_pre_hook(look)

    def before_reduction(self) -> None:
        """A reduced backward begins, and uses all gradients."""
        around = [param for param, (*_, origin) in self.found.items() if origin is _AROUND]
        self.look(around, "a reduced backward")
        self.forget()

    def look(self, params: Iterable[Tensor], who: str) -> None:
        """``who`` uses the gradients of ``params`` now: say it if one of them was noted."""
        left = [param for param in params if self._is_left(param)]
        if left:
            self._is_over = True
            logger.warning(
                "%s: %s finds gradients that are not averaged over the ranks, those of %s. They "
                "come from %s. It is said once",
                *(self._where, who, listed([self.found[param][0] for param in left])),
                self.found[left[0]][2],
            )
        if self._is_over or not any(map(self._is_left, self.found)):
            self.forget()

    def forget(self) -> None:
        """The gradients were reduced or dropped."""
        self.found.clear()
        if self._hook is not None:
            _spent_hooks.append(self._hook)
            self._hook = None

    def _is_left(self, param: Tensor) -> bool:
        """Whether ``param`` still has the gradient that was noted, and that is not zero."""
        grad = param.grad
        if param not in self.found or grad is None or self.found[param][1]() is not grad:
            return False
        if grad.is_cuda and is_capturing():
            return False
        return grad.is_sparse or bool(grad.any())

    __del__ = forget


# Hooks to be removed in a backward: here an optimizer may be iterating over them.
_spent_hooks: list[Any] = []


def _before_step(unreduced: weakref.ref[UnreducedGradients], optimizer: Optimizer, *_: Any) -> None:
    """Hook of all optimizers, while gradients are noted."""
    noted = unreduced()
    if noted is not None:
        groups = optimizer.param_groups
        noted.look((param for group in groups for param in group["params"]), "an optimizer")


class EndsOfBackward:
    """The ends of all wrappers in one backward: all have launched when the first one waits.

    So two wrappers may be used in another order on each rank. The first end queues :meth:`finish`
    behind all callbacks that the engine has by then; only the engine holds this object. Waiting
    makes collectives of its own at times (a new order of gradients, for example), which block. So
    reductions are finished in the order in which their wrappers were made, as on the other ranks.

    Attributes:
        reducers: their backward is over, and their reductions are launched.
        local: of local backwards whose gradients :class:`UnreducedGradients` notes: the reducer,
            the parameters that have some, with their names, its rank and step, and whether it
            started inside ``no_sync``.
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
        reducers, self.reducers = self.reducers, []
        if len(reducers) > 1:
            reducers.sort(key=attrgetter("number"))
        if self.local:
            self._note_unreduced(reducers)
        failure: Exception | None = None
        for reducer in reducers:
            try:
                if reducer.run is not None and reducer.run.is_ended:
                    reducer.finish(reducer.run)
            except Exception as error:
                failure = failure or error
        if len(reducers) > 1 and failure is None:
            _refuse_shared_views(reducers)
        if failure is not None:
            raise failure

    def _note_unreduced(self, reducers: Sequence[Reducer]) -> None:
        """Note gradients that no wrapper reduces."""
        reduced = {param for each in reducers for param in each.manager.current.params}
        for reducer, left, where, is_inside in self.local:
            named = [each for each in left if each[1] not in reduced]
            reducer.unreduced.note(named, where, is_inside)
        self.local = []


def _refuse_shared_views(reducers: Sequence[Reducer]) -> None:
    """Raise a RuntimeError if a gradient would have to be a view of the buckets of two wrappers.

    The second one would take the gradient, divided already, from the bucket of the first. (In
    backwards of their own such wrappers are right.)
    """
    of_these = tuple((each.number, len(each.manager.current.names)) for each in reducers)
    if of_these in _without_shared_views:
        return
    names: dict[Tensor, str] = {}
    sets = [each.manager.current for each in reducers]
    if any(bucket.has_views for each in sets for bucket in each.buckets):
        for each in sets:
            for name, param in zip(each.names, each.params, strict=True):
                if param in names:
                    raise RuntimeError(
                        f"{reducers[0].where()}: this backward is reduced by two wrapped modules "
                        f"that hold {names[param]!r} both, one of them with "
                        "gradient_as_bucket_view=True: .grad is not the mean, as it would have to "
                        "be a view of the buckets of both. Leave the option off, or make two "
                        "backwards"
                    )
                names[param] = name
    _without_shared_views.add(of_these)


_without_shared_views: set[tuple[tuple[int, int], ...]] = set()

# Of backwards that have ended, by id.
_ends: weakref.WeakValueDictionary[int, EndsOfBackward] = weakref.WeakValueDictionary()


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
        output.register_hook(partial(tell, reference, forward))


def tell(reducer: weakref.ref[Reducer], forward: Forward | None, _: Tensor) -> None:
    """The hook: a gradient has come, through an output of ``forward`` or elsewhere."""
    told = reducer()
    if told is not None:
        told.on_backward(forward)


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
            stack.extend(item)
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
        else:
            stack.extend(tree_leaves(item))
    return tensors
