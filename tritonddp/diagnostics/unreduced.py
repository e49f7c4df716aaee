"""Gradients that stay on their rank, though perhaps they should not: said once for each wrapper."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tritonddp._device import is_capturing
from tritonddp._torch import tensor_behind
from tritonddp.buckets.manager import BucketManager
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.failures import listed
from tritonddp.reducer.extension import Events, Extension
from tritonddp.reducer.graph.backward import Backward, SyncState

logger = logging.getLogger(__name__)

AROUND = (
    "a backward that went through no forward of the wrapped module (a call of .module, of a method "
    "or of a submodule is none), which stays on its rank, as in stock DDP. If that was not meant, "
    "call the wrapper itself, or reduce_gradients() after the backward. If it was, drop the "
    "gradients by zero_grad() before others use them, or let this be"
)
INSIDE = (
    "a backward that started inside no_sync(), and none was reduced after it. (Stock DDP reduces "
    "it, if its forward ran outside.) Run the last backward before a step outside no_sync()"
)
ADDED = (
    "a backward inside no_sync() that added to gradients which were averaged already, and none was "
    "reduced after it, as where the first microbatch is reduced instead of the last. Run the last "
    "backward before a step outside no_sync(), and all others inside"
)

# Attribute of a gradient that is noted, with the number of the note: another gradient of the same
# parameter may have that of an earlier one. (A weak reference would keep swap_tensors from it, and
# the note itself pickle.)
_MARK = "_tritonddp_note"
_seqs = count()


class UnreducedGradient(NamedTuple):
    """A gradient that a backward has left on its rank, though perhaps it should not.

    There are three origins: a backward that went around the wrapper (``AROUND``), which stock DDP
    ignores without a word, so that whoever trains through ``.module`` by mistake trains each rank
    by itself; a backward inside ``no_sync`` of a forward outside (``INSIDE``), which stock reduces;
    and a local backward that has added to means (``ADDED``). A warning is logged, once for each
    wrapper, when an optimizer finds such a gradient, or in the first case the next reduced
    backward. None is logged for gradients that were dropped, zeroed or reduced before.

    Attributes:
        seq: of the note, and the mark of the gradient.
        name, where: the parameter's name; the rank and its step.
        origin: ``AROUND``, ``INSIDE`` or ``ADDED``.
        owner: of the wrapper.
    """

    seq: int
    name: str
    where: str
    origin: str
    owner: weakref.ref[UnreducedGradients]

    def is_left(self, param: Tensor) -> bool:
        """Whether the parameter still has this gradient, and that is not zero."""
        grad = param.grad
        if grad is None or getattr(grad, _MARK, None) != self.seq:
            return False
        if grad.is_cuda and is_capturing():
            return False
        return grad.is_sparse or bool(grad.any())


# Of all wrappers in this process, by the id of the parameter. Empty unless there are some.
noted: dict[int, UnreducedGradient] = {}
# The hook of all optimizers that looks for them, once there was one. (It cannot be removed: an
# optimizer of another thread may be iterating over the hooks.)
_hooks: list[Any] = []


class UnreducedGradients(Extension):
    """Notes such gradients of one wrapper, and warns of them; see :class:`WatchLocalBackwards`.

    Args:
        manager: of the buckets.
        sync: settings of the next backward.
        is_alone: there is one rank: no gradient should be reduced that is not. (But the gradients
            that it reduces may be noted by a wrapper of the same module in a larger group.)
    """

    def __init__(self, manager: BucketManager, sync: SyncState, is_alone: bool) -> None:
        self._manager, self._sync, self._has_warned = manager, sync, is_alone
        self._local: Backward | None = None  # the local backward that runs
        self._origin = ""  # of its gradients
        # Of the last reduction, until a local backward follows: a parameter's index, the tensor
        # behind its gradient, and the version of that. (A weak reference to a tensor would keep
        # swap_tensors from it.)
        self._mean: tuple[int, int, int] | None = None
        # Whether it was not zero when a local backward began, on the gradient's device.
        self._had_mean: Tensor | None = None

    def on_begin(self, backward: Backward) -> None:
        """Look for gradients that a reduced backward should not find; or note a local one."""
        if backward.reduction is not None:
            if noted:
                taken = _take(self._manager.current.params)
                around = [each for each in taken if each.owner() is self and each.origin is AROUND]
                self.warn(around, "a reduced backward")
        elif self._sync.join is None:
            WatchLocalBackwards.install_all()  # in wrappers that were made since
            self._local, adds = backward, self._adds_to_means()
            if backward.forward is not None:
                self._origin = INSIDE if backward.forward.syncs else ADDED if adds else ""
            elif backward.bypasses_forward and backward.may_be_reduced:
                self._origin = AROUND

    def _adds_to_means(self) -> bool:
        """Whether the backward that begins adds to means that nobody has dropped or zeroed."""
        mean, self._mean = self._mean, None
        params = self._manager.current.params
        grad = None if mean is None or mean[0] >= len(params) else params[mean[0]].grad
        if mean is None or grad is None or mean[1:] != (tensor_behind(grad), grad._version):
            return False
        if grad.is_sparse or (grad.is_cuda and is_capturing()):
            return False
        # (Zeroing through .data changes no version. The host does not wait for the answer here.)
        self._had_mean = grad.detach().any()
        return True

    def on_close(self, reduction: Reduction | None) -> None:
        """Note the gradients of a local backward; or forget those that were reduced."""
        local, origin = self._local, self._origin
        self._local, self._origin = None, ""
        current = self._manager.current
        if reduction is not None:
            if noted:
                for param in current.params:
                    noted.pop(id(param), None)
            grads = ((n, p.grad) for n, p in enumerate(current.params) if p.grad is not None)
            self._mean = next(((n, tensor_behind(grad), grad._version) for n, grad in grads), None)
        elif local is not None and origin and not self._has_warned:
            is_inside = local.forward is not None and local.forward.syncs
            self._note(local.where, INSIDE if is_inside else origin)

    def _note(self, where: str, origin: str) -> None:
        current, owner = self._manager.current, weakref.ref(self)
        for index in current.use.ready_indices():
            grad = current.params[index].grad
            if grad is not None:
                note = UnreducedGradient(next(_seqs), current.names[index], where, origin, owner)
                noted[id(current.params[index])] = note
                setattr(grad, _MARK, note.seq)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))

    def on_abort(self, reduction: Reduction | None) -> None:
        """The local backward has failed, or is reduced after all."""
        self._local, self._origin = None, ""

    def warn(self, found: Sequence[UnreducedGradient], who: str) -> None:
        """Warn that ``who`` finds these, if there are any, the first time."""
        if not found:
            return
        had_mean = found[0].origin is not ADDED or (self._had_mean is not None and self._had_mean)
        if self._has_warned or not had_mean:
            return
        self._has_warned = True
        logger.warning(
            "%s: %s finds gradients that are not averaged over the ranks, those of %s. They come "
            "from %s. It is said once",
            found[0].where,
            who,
            listed([each.name for each in found]),
            found[0].origin,
        )


class WatchLocalBackwards(Extension):
    """Installs :class:`UnreducedGradients` in all wrappers at the first local backward of one.

    So a program without local backwards pays nothing.
    """

    live: ClassVar[WeakSet[WatchLocalBackwards]] = WeakSet()

    def __init__(
        self, manager: BucketManager, events: Events, sync: SyncState, is_alone: bool
    ) -> None:
        self._made = partial(UnreducedGradients, manager, sync, is_alone)
        self._events = weakref.ref(events)
        WatchLocalBackwards.live.add(self)

    def on_local(self, backward: Backward) -> None:
        """Install it, and be called no more."""
        self.install_all()

    @classmethod
    def install_all(cls) -> None:
        """Install :class:`UnreducedGradients` in all wrappers that have none."""
        while cls.live:
            cls.live.pop()._install()

    def _install(self) -> None:
        if (events := self._events()) is not None:
            events.remove(self)
            events.install(self._made())


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Hook of all optimizers."""
    if noted:
        left = _take(param for group in optimizer.param_groups for param in group["params"])
        for owner in dict.fromkeys(each.owner() for each in left):
            if owner is not None:
                owner.warn([each for each in left if each.owner() is owner], "an optimizer")
        for key, each in list(noted.items()):
            if each.owner() is None:
                noted.pop(key, None)


def _take(params: Iterable[Tensor]) -> list[UnreducedGradient]:
    """What was noted of these parameters, and is left: it is forgotten."""
    found = ((param, noted.pop(id(param), None)) for param in params)
    return [each for param, each in found if each is not None and each.is_left(param)]
