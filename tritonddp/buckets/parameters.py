"""Which parameters and buffers does the module hold now? Looked at in each forward.

Training loops freeze and unfreeze parameters, and replace and add some, after a model was wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tritonddp.buckets.sparse_bucket import sparse_parameters
from tritonddp.coordination.agreement import schema_hash
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.kernels.dispatch import GRADIENT_DTYPES, select

_requires_grad = attrgetter("requires_grad")
_dtype = attrgetter("dtype")


class ModuleParameters:
    """The parameters and buffers of the module in ``wrapper``, and whether they are still the same.

    Args:
        wrapper: holds the module as its child ``module``, which may be replaced as well.
        ignored: names of parameters and buffers to leave out, as the module has them.
        group: the ranks that hold the same module.
        is_fixed: parameters are those of the beginning, whatever the module holds later.

    Attributes:
        params: all parameters, each once, with the first of its names.
        trainable: those of them that required gradients at the last :meth:`update`.
        sparse: those whose gradients are expected to be sparse.
        added: those that are in no bucket and have required gradients since the last reduction.
        number: of the wrapper among those of its process group; -1 until :meth:`register`.
        schema: a hash of the trainable and the added ones, which should be alike on all ranks.
        is_uncommitted: what has changed may not have on all ranks: see :meth:`commit`.
        buffer_tables: of all modules: if all are empty, there are no buffers.
    """

    def __init__(
        self, wrapper: nn.Module, ignored: Collection[str], group: Group, is_fixed: bool = False
    ) -> None:
        self.is_fixed = is_fixed
        # Not the wrapper itself: its reducer holds this object, and it the reducer.
        self._children = wrapper._modules
        self._ignored = ignored
        self._buffers_since_update: list[tuple[str, dict[str, Tensor | None]]] = []
        self._held: list[Any] = []
        # As of the last look: keys and numbers of keys, tensors, and what buffers() returned.
        self._buffer_places: list[int | str] = []
        self._held_buffers: list[Tensor | None] = []
        self._named_buffers: list[tuple[str, Tensor]] = []
        self.params: list[tuple[str, Parameter]] = []
        self._group = group
        self.number = -1
        self._bucketed: dict[Tensor, str] = {}
        self.added: list[tuple[str, Parameter]] = []
        self._grads_of_added: dict[Tensor, tuple[Tensor, int]] = {}
        self.update()
        self.commit()

    def register(self) -> None:
        """All ranks hold the same module: number its wrapper, alike on all of them.

        Once, and no later than in its first reduction. One that was loaded or copied is not
        numbered before that: perhaps only one rank has it, to look at or to save.
        """
        if self.number < 0:
            self.number = self._group.next_wrapper()
            self._sort()

    def set_bucketed(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        """These parameters, and no others, are in buckets now."""
        self._bucketed = dict(zip(params, names, strict=True))
        self._in_buckets = list(params)
        self._devices = [param.device for param in params]
        self._kinds = self._kinds_now()
        self._grads_of_added.clear()
        self._sort()

    def refresh(self, where: Callable[[], str]) -> bool:
        """Whether parameters were frozen, unfrozen, replaced, added or taken away since the last.

        What is in a bucket and gets no gradient any more is unused from now on, which needs no
        action. What is in no bucket, :attr:`added`, waits for the end of the next reduced
        backward: by then the headers have told whether all ranks have changed alike. ``where`` is
        asked for this rank's place, for errors.

        Raises:
            NotImplementedError: a parameter was added that cannot be reduced.
        """
        if not self.has_changed():
            return False
        known = {param for _, param in self.added}
        self.update()
        for name, param in self.added:
            select(param.device)  # raises where there are no kernels
            if param.dtype not in GRADIENT_DTYPES:
                self._held = []  # so that the next call finds it, too
                raise NotImplementedError(
                    f"{where()}: parameter {name!r}, added after the module was wrapped, is "
                    f"{param.dtype}; tritonddp reduces {', '.join(map(str, GRADIENT_DTYPES))}"
                )
            if param not in known and param.grad is not None:
                self._grads_of_added[param] = param.grad, param.grad._version
        return True

    def check_kinds(self, unreached: Collection[int], where: Callable[[], str]) -> None:
        """Why does a backward not reach these parameters? Mostly because they are unused.

        They are numbered as by :meth:`set_bucketed`.

        Raises:
            RuntimeError: a parameter has changed its dtype or device, and with it the autograd
                node that has our hooks.
        """
        if self._kinds_now() == self._kinds:
            return
        for number in unreached:
            param = self._in_buckets[number]
            was, now = (self._kinds[0][number], self._devices[number]), (param.dtype, param.device)
            if now != was:
                raise RuntimeError(
                    f"{where()}: parameter {self._bucketed[param]!r} was {was[0]} on {was[1]} when "
                    f"it was wrapped and is now {now[0]} on {now[1]}, so that its gradient would "
                    "not be synchronised: wrap the module again after such a change"
                )

    def _kinds_now(self) -> tuple[list[torch.dtype], list[int]]:
        """Dtype and index of the device of all that is in buckets: 0.15 us each."""
        return list(map(_dtype, self._in_buckets)), list(map(Tensor.get_device, self._in_buckets))

    def has_new_gradient(self, param: Tensor) -> bool:
        """Whether the gradient of an added parameter has come, or changed, since it was added."""
        grad, before = param.grad, self._grads_of_added.get(param)
        return grad is not None and (
            before is None or grad is not before[0] or grad._version != before[1]
        )

    def update(self) -> None:
        """Look at all modules."""
        self.is_uncommitted = True
        module = self._children["module"]
        assert module is not None
        modules = list(module.named_modules())
        found = [each for each in module.named_parameters() if each[0] not in self._ignored]
        # Under torch.func.functional_call tensors made from parameters stand in for them during
        # this forward. Their gradients go to the parameters.
        former, all_leaves = dict(self.params), all(param.is_leaf for _, param in found)
        self.params = [
            (name, param if param.is_leaf else former[name])
            for name, param in found
            if param.is_leaf or name in former
        ]
        announced = sparse_parameters(module.modules())
        sparse_names = {name for name, param in found if param in announced}
        self.sparse = {param for name, param in self.params if name in sparse_names}
        self._buffers_since_update = [(name, each._buffers) for name, each in modules]
        self.buffer_tables = [each._buffers for _, each in modules]
        # Modules keep their parameters and submodules in such dictionaries. Comparing all that is
        # in them takes 0.06 us each, and no walk.
        tables: list[dict[str, Any]] = [self._children]
        for _, each in modules:
            tables += (each._parameters, each._modules)
        self._tables = list(filter(None, tables))
        self._empty_tables = [table for table in tables if not table]
        self._held = list(chain.from_iterable(map(dict.values, self._tables if all_leaves else ())))
        self._sort()

    def commit(self) -> None:
        """All ranks have changed alike, and so hold the same buffers."""
        self._buffers = self._buffers_since_update
        self._buffer_places = []
        self.is_uncommitted = False

    def _sort(self) -> None:
        self.trainable = [(name, param) for name, param in self.params if param.requires_grad]
        self._looked_at = [param for _, param in self.params]
        self._required = list(map(_requires_grad, self._looked_at))
        # Also what has been frozen again meanwhile: it may have got a gradient.
        waiting = {param for _, param in self.added} | {param for _, param in self.trainable}
        self.added = [
            (name, param)
            for name, param in self.params
            if param in waiting and param not in self._bucketed
        ]
        self.schema = schema_of(
            self.trainable,
            f"wrapper {self.number}",
            *(f"+{name}" for name, _ in self.added),
            *(f"sparse {name}" for name in self.names_of_sparse()),
        )

    def names_of_sparse(self) -> list[str]:
        """Of the trainable parameters, those whose gradients are expected to be sparse."""
        return [name for name, param in self.trainable if param in self.sparse]

    def has_changed(self) -> bool:
        """Whether anything is not as it was at the last :meth:`update`."""
        if self.is_fixed:
            return False
        if list(map(_requires_grad, self._looked_at)) != self._required or any(self._empty_tables):
            return True
        held = list(chain.from_iterable(map(dict.values, self._tables)))
        return len(held) != len(self._held) or not all(map(is_, held, self._held))

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers that all ranks hold, each once. Modules may reassign them at any time."""
        tables = [table for _, table in self._buffers]
        # As for parameters: comparing all that is there takes less than naming it anew.
        held = list(chain.from_iterable(map(dict.values, tables)))
        places: list[int | str] = [*map(len, tables), *chain.from_iterable(tables)]
        if places != self._buffer_places or not all(map(is_, held, self._held_buffers)):
            found: dict[Tensor, str] = {}
            for prefix, table in self._buffers:
                for key, buffer in table.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if buffer is not None and name not in self._ignored:
                        found.setdefault(buffer, name)
            named = [(name, buffer) for buffer, name in found.items()]
            if not all(buffer.is_leaf for buffer in found):
                return named  # they hold a graph: this keeps them no longer than somebody else
            self._named_buffers, self._held_buffers, self._buffer_places = named, held, places
        return self._named_buffers

    def verify(self, where: str, requested: Sequence[tuple[str, Tensor]] | None = None) -> NoReturn:
        """Explain, together with all ranks, why they do not reduce the same.

        ``requested`` is what this rank reduces on request, ``None`` in a backward.

        Raises:
            RuntimeError: always, naming what differs.
        """
        kind = type(self._children["module"]).__name__
        options = {
            "new parameters": [name for name, _ in self.added],
            "sparse gradients": self.names_of_sparse(),
            "wrapper": f"number {self.number} in its process group, of a {kind}",
            "reduction": "of a backward" if requested is None else "on request (reduce_gradients)",
        }
        params = self.params if requested is None else requested
        # Nothing of this is taken up; at the next forward each rank looks anew.
        self.added, self._held = [], []
        description = describe(params, self.buffers(), options)
        verify_same(description, self._group, params[0][1].device, where)
        raise RuntimeError(
            f"{where}: another rank has reduced something else in this place: do all ranks call "
            "their wrapped modules in the same order?"
        )


def schema_of(named_params: Sequence[tuple[str, Tensor]], *more: str) -> bytes:
    """Hash of the parameters and whatever else should be alike on all ranks."""
    parts = [f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named_params]
    return schema_hash([*parts, *more])
