"""When does a backward of the module begin? Hooks on what its forward returned."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from tritonddp._torch import backward_hooks_of, tree_leaves


class Forward:
    """One forward of the module, as long as its graph lives.

    Attributes:
        number: of the forwards of this wrapper.
        reductions: how many reductions there had been before it.
        syncs: it ran outside ``no_sync``, so that backwards through its outputs may be reduced.
        reached: a backward that is reduced has gone through its outputs.
    """

    __slots__ = ("number", "reached", "reductions", "syncs")

    def __init__(self, number: int, reductions: int, syncs: bool) -> None:
        self.number = number
        self.reductions = reductions
        self.syncs = syncs
        self.reached = False


class Forwards:
    """What the forwards until now say of the next backward: is it reduced, or does it accumulate?

    As in stock DDP a forward outside ``no_sync`` arms the reduction, until one has begun: then the
    next backward is reduced, whichever outputs it goes through. Until one is armed, a backward is
    local if its forward ran inside; if it goes through no output, or through none so far, the last
    forward is taken for its own. Beyond stock a backward that starts inside is local too.

    For a backward of the newest forward, all this follows from the order of calls, not from that in
    which autograd runs hooks, which differs between ranks that use different parameters. For one of
    an older forward, while a newer local one waits for its own, it may matter which hook is first.
    """

    def __init__(self) -> None:
        self._number = 0
        self._prepared = 0  # the last forward whose next backward is reduced, wherever it starts
        self._is_armed = False
        self.was_local = False  # the last forward, which no backward has followed

    def ended(self, reductions: int, syncs: bool) -> Forward:
        """One has run, before which there were so many reductions.

        Args:
            reductions: so many.
            syncs: it ran outside ``no_sync``.
        """
        self._number += 1
        self._is_armed = self._is_armed or syncs
        self.was_local = not syncs
        return Forward(self._number, reductions, syncs)

    def prepare(self) -> None:
        """The next backward is to be reduced, also of forwards that ran under ``no_sync``."""
        self._is_armed = True
        self._prepared = self._number

    def decide(self, forward: Forward | None, is_enabled: bool) -> bool:
        """A backward begins: is it reduced, or does it only accumulate?

        Args:
            forward: through whose outputs it goes; ``None`` if that was not seen.
            is_enabled: it starts outside ``no_sync``.
        """
        if 0 < (self._number if forward is None else forward.number) <= self._prepared:
            reduced = True
        elif self._is_armed:
            reduced = is_enabled
        else:
            reduced = is_enabled and (not self.was_local if forward is None else forward.syncs)
        self.was_local, self._prepared = False, 0
        self._is_armed = self._is_armed and not reduced
        return reduced

    def forces(self, forward: Forward | None) -> bool:
        """Whether a backward is reduced although it starts inside ``no_sync``."""
        number = self._number if forward is None else forward.number
        return 0 < number <= self._prepared

    def keep_local(self, forward: Forward | None) -> bool:
        """Whether a backward through outputs of ``forward`` is local although it starts outside."""
        if self._is_armed:
            return False
        return self.was_local if forward is None else not forward.syncs

    def backward_begins(self, reduced: bool) -> None:
        """A backward begins."""
        self.was_local = False
        self._prepared = 0
        if reduced:
            self._is_armed = False


class Listener(Protocol):
    """Who is told that a backward begins; referred to weakly."""

    def on_backward(self, forward: Forward) -> None:
        """A backward goes through an output of ``forward``."""


def watch(outputs: Iterable[Tensor], listener: weakref.ref[Any], forward: Forward) -> None:
    """See the start of each backward that runs through one of these outputs of a forward.

    Without it the first gradient would do, but a backward that reaches no parameter of this rank
    must still take part, and one that starts with a reentrant checkpoint must be seen before its
    inner backward.

    Args:
        outputs: tensors.
        listener: told; an output may outlive it.
        forward: whose outputs they are.
    """
    for output in outputs:
        if output.grad_fn is None:
            continue
        hooks = backward_hooks_of(output)
        # A tensor that the module only hands on may live long: it gets one hook.
        if hooks and any(_is_of(listener, hook) for hook in hooks.values()):
            continue
        output.register_hook(partial(_output_reached, listener, forward))


def _output_reached(listener: weakref.ref[Listener], forward: Forward, _: Tensor) -> None:
    told = listener()
    if told is not None:
        told.on_backward(forward)


def _is_of(listener: weakref.ref[Any], hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func is _output_reached and hook.args[0] is listener


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
