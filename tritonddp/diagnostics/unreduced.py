"""Warning about local gradients that possibly should be reduced, once for each wrapper."""

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
    "a backward that bypassed the wrapper (through .module, another method or a submodule), which "
    "stays local as in stock DDP. If this is not intended, call the wrapper, or call "
    "reduce_gradients() after the backward. If it is intended, discard the gradients with "
    "zero_grad() before they are used, or ignore this warning"
)
INSIDE = (
    "a backward that started inside no_sync(), without a reduced backward after it. (Stock DDP "
    "reduces such a backward if its forward ran outside.) Run the last backward before a step "
    "outside no_sync()"
)
ADDED = (
    "a backward inside no_sync() that added to averaged gradients, without a reduced backward "
    "after it, for example because the first microbatch was reduced instead of the last. Run the "
    "last backward before a step outside no_sync(), and all others inside"
)

# Attribute of a recorded gradient: the number of its record, to distinguish it from other gradients
# of the parameter. A weak reference would prevent swap_tensors, and the record itself pickling.
_MARK = "_tritonddp_note"
_seqs = count()


class UnreducedGradient(NamedTuple):
    """A local gradient that possibly should be reduced.

    There are three origins. ``AROUND``: a backward bypassed the wrapper. Stock DDP does not warn,
    so a program that trains through ``.module`` by mistake trains each rank separately. ``INSIDE``:
    a backward inside ``no_sync`` had its forward outside, and stock DDP reduces it. ``ADDED``: a
    local backward added to means. A warning is logged once for each wrapper, when an optimizer
    finds such a gradient, or for ``AROUND`` also when the next reduced backward does. Gradients
    that were dropped, zeroed or reduced before cause no warning.

    Attributes:
        seq: number of the record, and the mark of the gradient.
        name, where: name of the parameter; the rank and its step.
        origin: ``AROUND``, ``INSIDE`` or ``ADDED``.
        owner: the recording extension of the wrapper.
    """

    seq: int
    name: str
    where: str
    origin: str
    owner: weakref.ref[UnreducedGradients]

    def is_left(self, param: Tensor) -> bool:
        """Return whether the parameter still has this gradient, and it is not zero."""
        grad = param.grad
        if grad is None or getattr(grad, _MARK, None) != self.seq:
            return False
        if grad.is_cuda and is_capturing():
            return False
        return grad.is_sparse or bool(grad.any())


# Records of all wrappers in this process, by the id of the parameter. Usually empty.
noted: dict[int, UnreducedGradient] = {}
# The hook of all optimizers that looks for records, once there was one. It is never removed,
# because an optimizer on another thread may be iterating over the hooks.
_hooks: list[Any] = []


class UnreducedGradients(Extension):
    """Records the local gradients of one wrapper, and warns; see :class:`WatchLocalBackwards`.

    Args:
        manager: the bucket manager.
        sync: settings of the next backward.
        is_alone: ``world_size == 1``: do not warn, because nothing needs to be reduced. A wrapper
            of the same module in a larger group may still record the gradients reduced here.
    """

    def __init__(self, manager: BucketManager, sync: SyncState, is_alone: bool) -> None:
        self._manager, self._sync, self._has_warned = manager, sync, is_alone
        self._local: Backward | None = None  # the running local backward
        self._origin = ""  # origin of its gradients
        # From the last reduction until a local backward: the index of a parameter, the tensor that
        # holds its gradient, and the version of that tensor. It must not be a weak reference, which
        # would prevent swap_tensors.
        self._mean: tuple[int, int, int] | None = None
        # Whether that gradient was nonzero when a local backward began, on the gradient's device.
        self._had_mean: Tensor | None = None

    def on_begin(self, backward: Backward) -> None:
        """Before a reduced backward, check for recorded gradients; remember a local backward."""
        if backward.reduction is not None:
            if noted:
                taken = _take(self._manager.current.params)
                around = [each for each in taken if each.owner() is self and each.origin is AROUND]
                self.warn(around, "a reduced backward")
        elif self._sync.join is None:
            WatchLocalBackwards.install_all()  # in wrappers created since
            self._local, adds = backward, self._adds_to_means()
            if backward.forward is not None:
                self._origin = INSIDE if backward.forward.syncs else ADDED if adds else ""
            elif backward.bypasses_forward and backward.may_be_reduced:
                self._origin = AROUND

    def _adds_to_means(self) -> bool:
        """Return whether this backward adds to means that were not dropped or zeroed."""
        mean, self._mean = self._mean, None
        params = self._manager.current.params
        grad = None if mean is None or mean[0] >= len(params) else params[mean[0]].grad
        if mean is None or grad is None or mean[1:] != (tensor_behind(grad), grad._version):
            return False
        if grad.is_sparse or (grad.is_cuda and is_capturing()):
            return False
        # Zeroing through .data does not change the version. The host does not wait for the result.
        self._had_mean = grad.detach().any()
        return True

    def on_close(self, reduction: Reduction | None) -> None:
        """Record the gradients of a local backward, or discard records of reduced gradients."""
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
        """Discard a local backward that failed or is reduced after all."""
        self._local, self._origin = None, ""

    def warn(self, found: Sequence[UnreducedGradient], who: str) -> None:
        """Warn once that ``who`` uses these gradients, if there are any."""
        if not found:
            return
        had_mean = found[0].origin is not ADDED or (self._had_mean is not None and self._had_mean)
        if self._has_warned or not had_mean:
            return
        self._has_warned = True
        logger.warning(
            "%s: %s uses gradients that were not averaged over the ranks: %s. Their source is %s. "
            "(Shown once.)",
            found[0].where,
            who,
            listed([each.name for each in found]),
            found[0].origin,
        )


class WatchLocalBackwards(Extension):
    """Installs :class:`UnreducedGradients` in all wrappers at the first local backward of one.

    A program without local backwards has no cost.
    """

    live: ClassVar[WeakSet[WatchLocalBackwards]] = WeakSet()

    def __init__(
        self, manager: BucketManager, events: Events, sync: SyncState, is_alone: bool
    ) -> None:
        self._made = partial(UnreducedGradients, manager, sync, is_alone)
        self._events = weakref.ref(events)
        WatchLocalBackwards.live.add(self)

    def on_local(self, backward: Backward) -> None:
        """Install it, and remove this extension."""
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
    """Pre-step hook of all optimizers."""
    if noted:
        left = _take(param for group in optimizer.param_groups for param in group["params"])
        for owner in dict.fromkeys(each.owner() for each in left):
            if owner is not None:
                owner.warn([each for each in left if each.owner() is owner], "an optimizer")
        for key, each in list(noted.items()):
            if each.owner() is None:
                noted.pop(key, None)


def _take(params: Iterable[Tensor]) -> list[UnreducedGradient]:
    """Remove the records of these parameters. Return those that still apply."""
    found = ((param, noted.pop(id(param), None)) for param in params)
    return [each for param, each in found if each is not None and each.is_left(param)]
