"""When does a backward of the module begin? Hooks on what its forward returned."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tritonddp._torch import backward_hooks_of, tree_leaves
from tritonddp.reducer.extension import SyncState

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer


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
    While the reduction is not armed, a backward is local if its forward ran inside ``no_sync``. If
    the backward goes through no output, or none so far, the last forward counts as its own. Unlike
    stock, a backward that starts inside ``no_sync`` is local too.

    For a backward of the newest forward, the decision follows from the order of calls alone. It
    does not depend on the order in which autograd runs hooks, which differs between ranks that use
    different parameters. It may depend on it for a backward of an older forward, while a newer
    local forward still waits for its backward.
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
        if forward is None:
            number, is_local = self._number, self.was_local and not is_joined
        else:
            number, is_local = forward.number, not forward.syncs
        # (Inside join() ranks without inputs know only what the forward has told them.)
        if 0 < number <= self._prepared and not is_joined:
            reduced = True
        elif is_local and (is_joined or not self._is_armed):
            reduced = False
        else:
            reduced = sync.enabled if join is None else join.reduces_backward(sync.enabled, where())
        self.was_local, self._prepared = False, 0
        self._is_armed = self._is_armed and not reduced
        return reduced

    def reduction_begins(self) -> None:
        """A reduction on request begins: it disarms all forwards until now."""
        self.was_local, self._prepared, self._is_armed = False, 0, False


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
