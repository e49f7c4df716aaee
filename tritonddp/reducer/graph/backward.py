"""One backward of the module: its start, its phase, and its end."""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from gc import get_referents
from operator import attrgetter
from threading import get_ident
from types import NoneType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import unserializable_hook

from tritonddp._torch import (
    backward_hooks_of,
    current_autograd_node,
    current_graph_task_id,
    queue_end_of_backward,
    tree_leaves,
)
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.agreement import GradSource
from tritonddp.coordination.group import Outstanding


class SyncState:
    """Settings of the next backward: the wrapper writes them, the reducer reads them."""

    __slots__ = ("enabled", "finds_unused", "join", "join_hook", "weight")

    def __init__(self) -> None:
        self.enabled = True  # the backward is reduced; False inside no_sync
        self.weight: Any = None  # weight of the gradients; None for an unweighted mean
        self.join: Any = None  # join protocol of the ranks inside join(); None outside
        self.join_hook: Any = None  # weak reference to the hook that the last Join runs, if any
        self.finds_unused: bool | None = None  # the option find_unused_parameters

    @property
    def source_rank(self) -> int:
        """Rank whose buffers and gradient order all ranks use."""
        return 0 if self.join is None else self.join.source_rank


@dataclass(eq=False, slots=True)
class Forward:
    """One forward of the module; lives as long as its graph."""

    seq: int  # counts the forwards of this wrapper
    reductions: int  # number of reductions before it
    syncs: bool  # it ran outside no_sync, so that backwards through its outputs may be reduced
    reached: bool = False  # a reduced backward has gone through its outputs

    def reach(self) -> None:
        """Record that a reduced backward, which began elsewhere, also goes through the outputs."""
        self.reached = True


class Forwards:
    """Decide from the previous forwards whether a backward is reduced or only accumulates.

    A *local* backward only accumulates. As in stock DDP, a forward outside ``no_sync`` arms the
    reduction: the next backward is reduced, whichever outputs it goes through, and disarms it.
    While the reduction is not armed, a backward is reduced if it goes through an output of a
    forward that ran outside ``no_sync``. All other backwards are local: those of forwards inside
    ``no_sync``, and those that go through no forward of the wrapper. Unlike in stock DDP, a
    backward that starts inside ``no_sync`` is always local.

    The decision does not depend on the order in which autograd runs hooks, which differs between
    ranks that use different parameters: a backward that starts as local, and then reaches such an
    output, is reduced from there on (``AutogradDriver._reduce_after_all``).

    Attributes:
        counts_any_call: the module is replicated in place: see :meth:`count_any_call`.
        seq: number of the last forward with gradients; 0 before the first.
        was_local: the last forward ran inside ``no_sync``, and has had no backward yet.
        by_call: the last backward had reached no output when it began, and no forward had armed
            it. If it is reduced, only :meth:`count_any_call` made it so.
        was_armed: how many forwards had armed the last reduced backward.
        ended_inside: ID of the :func:`~tritonddp.reducer.graph.participation.outer_call` of the
            backward inside which the reduction of the last forward ended; 0 if there is none.
    """

    def __init__(self) -> None:
        self.counts_any_call = False
        self.seq = 0
        self._prepared = 0  # last forward whose next backward is reduced even inside no_sync
        # How many forwards arm the reduction now, and how many had armed the last reduced backward.
        self._armed = self.was_armed = 0
        self.was_local = self.by_call = False
        self.ended_inside = 0

    def count_any_call(self) -> None:
        """Reduce every backward outside ``no_sync`` from now on, whatever it goes through."""
        self.counts_any_call = True

    def ended(self, reductions: int, syncs: bool) -> Forward:
        """Record that a forward has run; see :class:`Forward`."""
        self.seq += 1
        self._armed += syncs
        self.ended_inside = 0
        self.was_local = not syncs
        return Forward(self.seq, reductions, syncs)

    def prepare(self) -> None:
        """Reduce the next backward, even if its forward ran under ``no_sync``."""
        self._armed = max(self._armed, 1)
        self._prepared = self.seq

    def decide(
        self,
        forward: Forward | None,
        sync: SyncState,
        reductions: int,
        where: Callable[[], str],
    ) -> GradSource | None:
        """Decide whether a backward that begins is reduced or only accumulates.

        Inside ``join()`` the ranks decide together.

        Args:
            forward: the forward whose output it goes through; ``None`` if it has reached none
                so far.
            sync: settings of the user.
            reductions: number of reductions so far.
            where: returns this rank and its step, for messages.

        Returns:
            The source of its gradients, for the header; ``None`` if it only accumulates.
        """
        join = sync.join
        is_joined = join is not None and join.is_open
        seq = self.seq if forward is None else forward.seq
        self.by_call = not (forward or is_joined or self._armed)
        # Inside join(), ranks without inputs know only what the forward told them.
        if is_joined:
            is_wanted = forward is None or forward.syncs
        else:
            counts = self.counts_any_call if forward is None else forward.syncs
            is_wanted = self._armed > 0 or counts
        if 0 < seq <= self._prepared and not is_joined:
            reduced = True
        elif not is_wanted:
            reduced = False
        else:
            reduced = sync.enabled if join is None else join.reduces_backward(sync.enabled, where())
        self.was_local, self._prepared = False, 0
        if not reduced:
            return None
        self.was_armed, self._armed = self._armed, 0
        if forward is None:
            return ELSEWHERE
        was_reached, forward.reached = forward.reached, True
        if was_reached:
            return AGAIN
        # For example, an earlier backward may have bypassed the outputs of its forward.
        return FORWARD if forward.reductions == reductions else ELSEWHERE

    def end_inside(self, outer_call: int) -> None:
        """Record that a backward inside ``outer_call`` has ended; 0 if that call ended too."""
        self.ended_inside = outer_call

    def arm_again(self) -> None:
        """Arm the reduction again after its backward failed on all ranks before it sent anything.

        As in stock DDP, the next backward is reduced in its place.
        """
        self._armed = max(self._armed, self.was_armed)

    def reduction_begins(self) -> None:
        """Disarm all previous forwards when a reduction on request begins."""
        self.was_local, self._prepared, self._armed = False, 0, 0


_grad_fn_of = attrgetter("grad_fn")

# Number of polls, and seconds between them, to wait for a thread that holds a failed backward.
_TRIES, _PAUSE = 200, 1e-4


class Phase(enum.Enum):
    """The progress of a backward."""

    following: tuple[Phase, ...]  # the phases that may follow

    RUNNING = enum.auto()  # gradients become ready
    WAITING = enum.auto()  # it has ended and waits for its buckets; communication hooks run
    FAILED = enum.auto()  # an error ended it; this rank may owe collectives to the others


# Stored in globals, since reading an enum member from its class costs a call before Python 3.12.
RUNNING, WAITING, FAILED = Phase
RUNNING.following = WAITING, FAILED
WAITING.following = (FAILED,)
FAILED.following = ()
FORWARD, AGAIN, ELSEWHERE = GradSource.FORWARD, GradSource.AGAIN, GradSource.ELSEWHERE


@dataclass(eq=False)
class Backward:
    """One backward. A backward without a reduction only accumulates (*local*, as in ``no_sync``).

    Attributes:
        where: this rank and its step, for messages.
        reduction: reduction of its gradients; ``None`` if the backward is local.
        first_param: parameter whose gradient was ready before the backward was noticed, if any.
        is_provisional: the order of gradients is observed, and buckets are launched at the end.
        may_be_reduced: it is local only because it has reached no output of a forward outside
            ``no_sync`` so far.
        forward: for a local backward, the forward whose output it goes through; ``None`` if
            there is none.
        bypasses_forward: a local backward began at no output, and no forward inside ``no_sync``
            waits for its backward.
        phase: see :class:`Phase`; only :meth:`moves_to` sets it.
        is_unfinalized: it waits until the user calls ``finalize_backward()``.
        callback: weak reference to the callback, which only the engine holds until it calls it.
            If the engine drops the callback earlier, the backward has failed.
        graph_task: the engine's ID of the backward; -1 before it is known.
        creates_graph: it runs with ``create_graph=True``.
        is_inner: its first gradient was ready in a backward inside another one, as in reentrant
            checkpoints: see :meth:`outlives_inner`.
    """

    where: str
    reduction: Reduction | None = None
    first_param: Tensor | None = None
    is_provisional: bool = False
    may_be_reduced: bool = False
    forward: Forward | None = None
    bypasses_forward: bool = False
    creates_graph: bool = False
    is_inner: bool = False
    phase: Phase = field(default=RUNNING, init=False)
    is_unfinalized: bool = field(default=False, init=False)
    graph_task: int = field(default=-1, init=False)
    callback: Callable[[], object] | None = field(default=None, init=False)
    # The thread on which an inner backward has ended, until the outer backward continues.
    _inner_thread: int | None = field(default=None, init=False)

    @property
    def runs(self) -> bool:
        """Whether more gradients may become ready."""
        return self.phase is RUNNING

    def moves_to(self, phase: Phase) -> None:
        """Move to this phase.

        Raises:
            RuntimeError: this phase cannot follow the current one.
        """
        if phase not in self.phase.following:
            raise RuntimeError(f"{self.where}: a backward cannot move from {self.phase} to {phase}")
        self.phase, self.callback, self._inner_thread = phase, None, None

    def waits_for_user(self, waits: bool) -> None:
        """Set whether the backward has ended and waits for the user's ``finalize_backward()``."""
        if waits:
            self.moves_to(WAITING)
        self.is_unfinalized = waits

    def queue_end(
        self,
        end: Callable[[], None],
        broke_off: Callable[[object], None],
        local: Backward | None = None,
    ) -> None:
        """Call ``end`` when this backward ends.

        The engine drops the callbacks of a backward that fails. So a weak reference to a callback
        that only the engine holds shows whether the backward still runs.

        Args:
            end: called when the backward ends without an error.
            broke_off: called if the backward fails. No further gradient is expected then.
            local: the same backward, if it was local until now: its callback is already queued.
        """
        if local is not None:  # its callback stays: this may be an inner backward of a checkpoint
            self.graph_task, self.callback, local.callback = local.graph_task, local.callback, None
        else:
            self.graph_task = current_graph_task_id()
            self.callback = weakref.ref(end, broke_off)
            queue_end_of_backward(end)

    def outlives_inner(self, end: Callable[[], None], broke_off: Callable[[object], None]) -> bool:
        """Call ``end`` again when the outer backward ends, since an inner one has ended.

        The engine calls back for the innermost backward only. But it reports the node of the outer
        backward that ran the inner one. So the next nodes get a hook: the first one that runs
        queues ``end`` in the outer backward, which may be an inner one itself. If the reported node
        is not a Python function, a hook of the user ran the inner backward, which then is a whole
        backward.

        Returns:
            Whether this backward continues: False at the end of the outermost one.
        """
        node = current_autograd_node()
        is_function = isinstance(node, BackwardCFunction)
        following = [each for each, _ in node.next_functions if each] if is_function else []
        if not following:
            return False
        handles: list[Any] = []

        def go_on(_: Any) -> None:
            while handles:
                handles.pop().remove()
            if self._inner_thread is not None:
                self._inner_thread = None
                self.queue_end(end, broke_off)

        handles += [each.register_prehook(go_on) for each in following]
        # From here only these hooks hold ``end``; it is freed with the graph.
        self._inner_thread, self.callback = get_ident(), weakref.ref(end, broke_off)
        return True

    def keep_local(self, forward: Forward) -> None:
        """Keep the backward local, although it reached this forward outside ``no_sync``."""
        self.may_be_reduced, self.forward = False, forward

    def ends(self, driver: Ending, broke_off: Callable[[object], None]) -> None:
        """Schedule the wait for the launched buckets, after all wrappers in this backward ended.

        ``broke_off`` is called if the engine drops that callback.
        """
        reference = _ends.get(self.graph_task)
        ends = None if reference is None else reference()
        if ends is None:
            ends = EndsOfBackward()
            _ends[self.graph_task] = weakref.ref(ends, partial(_ends.pop, self.graph_task))
            queue_end_of_backward(ends.finish)
        ends.waiting.append((driver, self))
        self.moves_to(WAITING)
        self.callback = weakref.ref(ends, broke_off)

    def finish_waiting(self) -> None:
        """If this backward waits for the engine's last callback, run that callback now."""
        if self.phase is WAITING and self.callback is not None:
            ends = self.callback()
            if isinstance(ends, EndsOfBackward):
                ends.finish()

    def has_failed(self, is_on_gpu: bool) -> bool:
        """Return True if the backward has failed.

        An inner backward has also failed if the outer one failed before it continued: then the
        engine has no callback to drop, but the thread runs no backward.

        When a backward fails on a GPU, ``backward()`` may raise shortly before the device thread
        drops the callback. So this method polls briefly while the backward seems to run.
        """
        tries = _TRIES if is_on_gpu and current_graph_task_id() == -1 else 0
        while tries and self.runs:
            tries -= 1
            time.sleep(_PAUSE)
        is_left = self._inner_thread == get_ident() and current_graph_task_id() == -1
        return is_left or self.phase is FAILED

    def fail(self) -> None:
        """Record that the engine dropped the callback without calling it: the backward failed."""
        if FAILED in self.phase.following:
            self.moves_to(FAILED)


class Ending(Outstanding, Protocol):
    """A driver whose backward has ended."""

    @property
    def bucket_set(self) -> BucketSet:
        """Its buckets."""

    def where(self) -> str:
        """This rank and its step, for messages."""

    def finalize_backward(self) -> None:
        """Wait for the buckets of the backward that has ended."""


@dataclass(eq=False)
class EndsOfBackward:
    """The ends of all wrappers in one backward: no wrapper waits before all have launched.

    So ranks may use two wrappers in different orders. The first end queues :meth:`finish` after all
    callbacks that the engine has at that time; only the engine holds this object. Waiting sometimes
    runs further collectives, which block (for example for a new order of gradients). So reductions
    are finished in an order that is identical on all ranks: by the name of the process group, which
    ``new_group`` assigns, and by the number of the wrapper in the group.

    Attributes:
        waiting: drivers whose backward has ended and whose buckets are launched, each with its
            backward.
    """

    waiting: list[tuple[Ending, Backward]] = field(default_factory=list)

    def finish(self) -> None:
        """Wait for all reductions. An error in one does not prevent the others from finishing."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.finish()
        waiting = self.waiting
        failure: Exception | None = None
        if len(waiting) > 1:
            waiting.sort(key=lambda each: each[0].order)
            failure = _shared_views([driver for driver, _ in waiting])
        while waiting:
            driver, backward = waiting.pop(0)  # after Ctrl-C the rest is recovered later
            backward.callback = None  # refers to this object, which the engine did call
            try:
                driver.finalize_backward()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure


# Ends of backwards by engine ID. A plain dict, because WeakValueDictionary is written in Python:
# with cold caches it took four times as long per step.
_ends: dict[int, weakref.ref[EndsOfBackward]] = {}


def _shared_views(reducers: Sequence[Ending]) -> RuntimeError | None:
    """Return an error if a gradient would have to be a view of the buckets of two wrappers.

    The second wrapper would pack the gradient from the bucket of the first, where it is already
    divided. In separate backwards such wrappers work.
    """
    sets = [each.bucket_set for each in reducers]
    names: dict[Tensor, str] = {}
    if any(each.buckets[0].storage.has_views for each in sets):
        for each in sets:
            for name, param in zip(each.names, each.params, strict=True):
                if param in names:
                    return RuntimeError(
                        f"{reducers[0].where()}: two wrapped modules that share {names[param]!r} "
                        "reduce this backward, and one of them uses gradient_as_bucket_view=True. "
                        ".grad is not the mean, because it cannot be a view of the buckets of both "
                        "modules. Disable the option, or run two backwards"
                    )
                names[param] = name
    return None


def watch(reference: weakref.ref[Any], forward: Forward, outputs: Collection[Tensor]) -> None:
    """Notice the start of each backward through one of these outputs of a forward.

    The hook of the first gradient does not suffice: a backward that reaches no parameter of this
    rank must still be reduced, and a backward that starts with a reentrant checkpoint must be
    noticed before its inner backward. An output may outlive the reducer.

    Args:
        reference: weak reference to the driver whose ``on_backward()`` is called.
        forward: the forward.
        outputs: outputs of ``forward``.
    """
    hook = unserializable_hook(partial(call_back, reference, forward))
    if len(outputs) > 1:
        outputs = one_of_each_node(outputs)
    for output in outputs:
        if output.grad_fn is None:
            continue
        hooks = backward_hooks_of(output)
        # A tensor that the module passes through may live long; give it one hook only.
        if hooks and any(
            isinstance(each, partial) and each.func is call_back and each.args[0] is reference
            for each in hooks.values()
        ):
            continue
        with suppress(Exception):  # a subclass may refuse hooks; then the first gradient reports
            output.register_hook(hook)


def one_of_each_node(outputs: Collection[Tensor]) -> Collection[Tensor]:
    """Return one output of each node of the graph, without leaves.

    A hook on any output is called when the node runs. For each hook the engine copies the list of
    all gradients of the node: hooks on all ``n`` outputs of ``unbind`` would cost ``n * n``.
    """
    by_node = dict(zip(map(_grad_fn_of, outputs), outputs, strict=True))
    by_node.pop(None, None)
    return by_node.values()


def call_back(reference: weakref.ref[Any], forward: Forward | None, _: Tensor) -> None:
    """Report a gradient that reached an output of ``forward``; used as a hook."""
    listener = reference()
    if listener is not None:
        listener.on_backward(forward)


# Types of values that hold no other values, and of containers whose values C code returns.
_NUMBERS = frozenset({NoneType, bool, bytes, complex, float, int, str})
_LEAVES = _NUMBERS | {type, Tensor}
_PLAIN = frozenset({dict, list, tuple, set, frozenset})
_BUILTIN = _LEAVES | _PLAIN
# A container with more values than this is skipped if its first value is a number.
_MANY = 32


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts, sets, dataclasses and pytree nodes.

    Other objects are not searched, since that may run code of the user: a backward through tensors
    that are not found is noticed at its first gradient. A tensor that occurs twice may be returned
    twice. Values of one type are handled together, so that a large output does not cost one Python
    call per value.
    """
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}  # a container may contain itself
    stack = [({type(output)}, [output])]
    while stack:
        kinds, values = stack.pop()
        if Tensor in kinds:
            tensors += _of_types({Tensor}, kinds, values)
        families = [{kind} for kind in kinds - _BUILTIN]
        if plain := kinds & _PLAIN:
            families.append(plain)
        for family in families:
            containers = _of_types(family, kinds, values)
            if issubclass(type(containers[0]), Tensor):
                tensors += containers
                continue
            inner, held = _values_in(containers)
            if inner - _LEAVES:
                new = dict(zip(map(id, containers), containers, strict=True))
                if len(new) < len(containers) or not seen.keys().isdisjoint(new):
                    new = {key: each for key, each in new.items() if key not in seen}
                    inner, held = _values_in([*new.values()])
                seen |= new
            if held:
                stack.append((inner, held))
    return tensors


def _of_types(family: set[type], kinds: set[type], values: list[Any]) -> list[Any]:
    return values if kinds <= family else [each for each in values if type(each) in family]


def _values_in(containers: list[Any]) -> tuple[set[type], list[Any]]:
    """Return the values in these objects, of one type or plain, and the values' types."""
    held: list[Any] = []
    kind = type(containers[0]) if containers else NoneType
    if kind in _PLAIN:
        held = get_referents(
            *(each for each in containers if len(each) <= _MANY or not _begins_with_number(each))
        )
    elif issubclass(kind, dict | list | tuple | set | frozenset) or is_dataclass(kind):
        held = get_referents(*containers)  # isinstance() and field access may run user code
    else:
        with suppress(Exception):  # raised by a user's flatten function
            held = [leaf for each in containers for leaf in tree_leaves(each) if leaf is not each]
    return {*map(type, held)}, held


def _begins_with_number(container: Any) -> bool:
    values = container.values() if type(container) is dict else container
    return type(next(iter(values))) in _NUMBERS
