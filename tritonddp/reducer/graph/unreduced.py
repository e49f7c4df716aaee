"""Gradients that stay on their rank, though perhaps they should not: said once for each wrapper."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from itertools import count
from operator import or_
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tritonddp._device import is_capturing
from tritonddp._torch import tensor_behind
from tritonddp.coordination.failures import listed

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
_numbers = count()


class UnreducedGradient(NamedTuple):
    """A gradient that a backward has left on its rank, though perhaps it should not.

    There are three origins: a backward that went around the wrapper (``AROUND``), which stock DDP
    ignores without a word, so that whoever trains through ``.module`` by mistake trains each rank
    by itself; a backward inside ``no_sync`` of a forward outside (``INSIDE``), which stock reduces;
    and a local backward that has added to means (``ADDED``). A warning is logged, once for each
    wrapper, when an optimizer finds such a gradient, or in the first case the next reduced
    backward. None is logged for gradients that were dropped, zeroed or reduced before.

    Attributes:
        number: of the note, and the mark of the gradient.
        name, where: the parameter's name; the rank and its step.
        origin: ``AROUND``, ``INSIDE`` or ``ADDED``.
        owner: of the wrapper.
    """

    number: int
    name: str
    where: str
    origin: str
    owner: weakref.ref[Unreduced]

    def is_left(self, param: Tensor) -> bool:
        """Whether the parameter still has this gradient, and that is not zero."""
        grad = param.grad
        if grad is None or getattr(grad, _MARK, None) != self.number:
            return False
        if grad.is_cuda and is_capturing():
            return False
        return grad.is_sparse or bool(grad.any())


# Of all wrappers in this process, by the id of the parameter. Empty unless there are some.
noted: dict[int, UnreducedGradient] = {}
# The hook of all optimizers that looks for them, once there was one. (It cannot be removed: an
# optimizer of another thread may be iterating over the hooks.)
_hooks: list[Any] = []


class Unreduced:
    """The gradients of one wrapper that no reduction has taken yet.

    Those that perhaps should have been reduced are in :data:`noted`.

    Attributes:
        used: for each parameter, whether a backward that was not reduced has used it.
        has_any: there was such a backward.
    """

    def __init__(self) -> None:
        self.used: list[bool] = []
        self.has_any = False
        self._has_warned = False
        # Of the last reduction, until a local backward follows: the number of a parameter, the
        # tensor behind its gradient, and the version of that. (A weak reference to a tensor would
        # keep swap_tensors from it.)
        self._mean: tuple[int, int, int] | None = None
        # Whether it was not zero when a local backward began, on the gradient's device.
        self._had_mean: Tensor | None = None

    def add(self, used: Iterable[bool]) -> None:
        """A backward that is not reduced has used these parameters."""
        self.used = list(map(or_, self.used, used))
        self.has_any = True

    def clear(self, params: Sequence[Tensor]) -> None:
        """All gradients of these parameters, which are all in buckets, are reduced.

        Called where a local backward has been before, so that other programs pay nothing.
        """
        if noted:
            for param in params:
                noted.pop(id(param), None)
        means = ((n, param.grad) for n, param in enumerate(params) if param.grad is not None)
        self._mean = next(((n, tensor_behind(grad), grad._version) for n, grad in means), None)
        self.used = [False] * len(params)
        self.has_any = False

    def renumber(self, former: Sequence[int | None], params: Sequence[Tensor]) -> None:
        """Parameter ``i`` had number ``former[i]``, or ``None`` if it is new.

        Then its gradient, if it has one, may be of a backward that was not reduced, if any was not.
        """
        pairs = zip(former, params, strict=True)
        self.used = [
            self.has_any and p.grad is not None if old is None else self.used[old]
            for old, p in pairs
        ]

    def adds_to_means(self, params: Sequence[Tensor]) -> bool:
        """Whether a local backward that begins adds to means that nobody has dropped or zeroed."""
        mean, self._mean = self._mean, None
        grad = None if mean is None or mean[0] >= len(params) else params[mean[0]].grad
        if mean is None or grad is None or mean[1:] != (tensor_behind(grad), grad._version):
            return False
        if grad.is_sparse or (grad.is_cuda and is_capturing()):
            return False
        # (Zeroing through .data changes no version. The host does not wait for the answer here.)
        self._had_mean = grad.detach().any()
        return True

    def note(self, named_params: Iterable[tuple[str, Tensor]], where: str, origin: str) -> None:
        """A backward has left gradients in these parameters.

        Args:
            named_params: the parameters.
            where: this rank and step.
            origin: of the gradients: see :class:`UnreducedGradient`.
        """
        if self._has_warned:
            return
        for name, param in named_params:
            if param.grad is not None:
                note = UnreducedGradient(next(_numbers), name, where, origin, weakref.ref(self))
                noted[id(param)] = note
                setattr(param.grad, _MARK, note.number)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))

    def reduced_backward_begins(self, params: Iterable[Tensor]) -> None:
        """Warn of gradients of these parameters that it should not find, and forget all."""
        taken = _take(params)
        around = [each for each in taken if each.owner() is self and each.origin is AROUND]
        self.warn(around, "a reduced backward")

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
