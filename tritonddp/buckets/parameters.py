"""The current parameters and buffers of the module, checked in each forward.

Training loops freeze, unfreeze, replace and add parameters after a model was wrapped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, count
from operator import attrgetter, is_, is_not, methodcaller
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tritonddp._torch import count_swaps, like, swaps, tensor_behind
from tritonddp.buckets.grad_storage.sparse_rows import sparse_parameters
from tritonddp.buckets.ignored import Ignored, parameters_of
from tritonddp.coordination.agreement import Mismatch, schema_hash
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import TRAIN_THE_SAME, describe, verify_same
from tritonddp.kernels.dispatch import GRADIENT_DTYPES, gradient_dtype, select
from tritonddp.kernels.flat_buffer import shared

_requires_grad = attrgetter("requires_grad")
_values = methodcaller("values")
# Number of cached schemas. Loops that freeze and unfreeze alternate between a few.
_MOST_SCHEMAS = 8
# Properties of a parameter on which all ranks and the buckets depend.
_kind = attrgetter("shape", "dtype", "device", "layout")


class _Kinds:
    """The properties that buckets expect of their parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.expected = shared(map(_kind, params))  # for each parameter, see _kind
        self._alike: Callable[..., bool] | None = None

    def check_kinds(self, params: Sequence[Tensor]) -> bool:
        """Return True if these parameters have not changed; usually one call in C."""
        if self._alike is not None and self._alike(*params):
            return True
        is_met = list(map(_kind, params)) == self.expected
        if is_met and all(layout is torch.strided for *_, layout in self.expected):
            self._alike = like(params)
        return is_met


class ModuleBuffers:
    """The buffers that all ranks hold, each once. Modules may reassign them at any time."""

    def __init__(self, children: Mapping[str, nn.Module | None], ignored: Ignored) -> None:
        self._children, self._ignored = children, ignored
        self._named_tables: list[tuple[str, Mapping[str, Tensor | None]]] = []  # of current modules
        self._agreed = self._named_tables  # the tables when the ranks last agreed
        # Cached at the last call: keys and their counts, tensors, and the result.
        self._places: list[int | str] = []
        self._held: list[Tensor | None] = []
        self._buffers: list[tuple[str, Tensor]] = []

    def update(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Set the current modules."""
        self._named_tables = [(name, _table(each._buffers)) for name, each in modules]

    def commit(self) -> None:
        """Adopt the current tables, after all ranks have made the same change."""
        if self._agreed is not self._named_tables and self._ignored.syncs_buffers:
            self._agreed, self._places = self._named_tables, []
            self.named(is_agreed=True)

    def named(self, is_agreed: bool) -> list[tuple[str, Tensor]]:
        """Return ``named_buffers()`` as in stock DDP, if buffers are synchronized.

        Until the ranks have agreed on a change, return the previous names, with the tensors that
        the modules now hold under them.
        """
        if not self._ignored.syncs_buffers:
            return []
        tables = [table for _, table in self._agreed]
        # As with parameters, comparing all buffers is faster than collecting their names again.
        held = list(chain.from_iterable(map(_values, tables)))
        places: list[int | str] = [*map(len, tables), *chain.from_iterable(tables)]
        if places != self._places or not all(map(is_, held, self._held)):
            if not is_agreed:
                now = {
                    f"{prefix}.{key}" if prefix else key: buffer
                    for prefix, table in self._agreed
                    for key, buffer in table.items()
                }
                taken_up = [(name, now.get(name, former)) for name, former in self._buffers]
                named = [(name, buffer) for name, buffer in taken_up if buffer is not None]
            else:
                named = self._ignored.buffers(self._module)
            if not all(buffer.is_leaf for _, buffer in named):
                return named  # not cached: a buffer with a graph would keep that graph alive
            self._buffers = named
            if is_agreed and not self._is_overridden():
                self._held, self._places = held, places
        return self._buffers

    @property
    def _module(self) -> Any:
        return self._children["module"]

    def _is_overridden(self) -> bool:
        method = getattr(self._module.named_buffers, "__func__", None)
        return method is not nn.Module.named_buffers


class ModuleParameters:
    """The parameters and buffers of the module in ``wrapper``, and whether they have changed.

    Args:
        wrapper: holds the module as its child ``module``, which may also be replaced.
        ignored: parameters and buffers that are left out.
        group: the ranks that hold the same module.
        keeps_frozen: each rank may freeze any parameter, as with
            ``find_unused_parameters=True`` in stock DDP: a frozen parameter stays in its bucket,
            and counts as unused.

    Attributes:
        params: all parameters, each once, with its first name.
        trainable: parameters that required gradients at the last :meth:`refresh`.
        sparse: parameters whose gradients are expected to be sparse.
        unplaced: trainable parameters that are in no bucket.
        number: number of the wrapper in its process group; -1 until :meth:`register`.
        schema: hash of the trainable parameters, and with ``keeps_frozen`` also of the frozen ones
            in buckets; should be identical on all ranks.
        is_agreed: the buckets hold all trainable parameters, and no removed parameter on which
            the ranks have not agreed. If False, the ranks must agree: see :meth:`commit`.
        module_buffers: see :class:`ModuleBuffers`.
        swaps_seen: ``_torch.swaps[0]`` at the last :meth:`check_swaps`.
    """

    def __init__(
        self, wrapper: nn.Module, ignored: Ignored, group: Group, keeps_frozen: bool = False
    ) -> None:
        # Not the wrapper, which would be a cycle: it refers to the reducer, which refers to this.
        self._children = wrapper._modules
        self.ignored, self.keeps_frozen = ignored, keeps_frozen
        self.module_buffers = ModuleBuffers(self._children, ignored)
        self._held: list[Any] = []
        self.params: list[tuple[str, Parameter]] = []
        self._group = group
        self.number = -1
        self._bucketed: dict[Parameter, str] = {}
        self._tensors = array("Q")  # the C++ tensor of each bucketed parameter
        count_swaps()
        self.swaps_seen = swaps[0]
        self._schemas: dict[tuple[bool, ...], bytes] = {}  # by requires_grad of all parameters
        self._registered: list[Parameter] = []  # since the last update()
        self.update()
        self.commit()

    @property
    def module(self) -> nn.Module:
        """The module."""
        module = self._children["module"]
        assert module is not None
        return module

    def shown(self) -> list[tuple[str, Parameter]]:
        """Return ``named_parameters()`` of the module, which may hide or add parameters."""
        named = self.module.named_parameters()
        return [each for each in named if each[0] not in self.ignored.names]

    def register(self) -> None:
        """Give the wrapper its number, identical on all ranks.

        This happens once, no later than the first reduction. A loaded or copied wrapper gets no
        number earlier: perhaps only one rank has it, to inspect or to save it.
        """
        if self.number < 0:
            self.number = self._group.next_wrapper()
            self._sort()

    def set_bucketed(self, names: Sequence[str], params: Sequence[Parameter]) -> None:
        """Record that these parameters, and no others, are in buckets now."""
        known = dict(zip(self._bucketed, self._tensors, strict=True))
        tensors = array("Q", [known.get(each, tensor_behind(each)) for each in params])
        bucketed = dict(zip(params, names, strict=True))
        self._bucketed, self._tensors = bucketed, tensors  # together, in spite of an interrupt
        self._kinds = _Kinds(params)
        self._sort()

    @property
    def held(self) -> set[Parameter]:
        """All parameters of the module."""
        return {param for _, param in self.params}

    def have_left(self) -> bool:
        """Return True if a bucketed parameter requires gradients, even if it was removed.

        Torch's transform for tensor parallelism replaces parameters by plain tensors.
        """
        return any(map(_requires_grad, self._bucketed))

    def bucketed(self) -> list[tuple[str, Parameter]]:
        """Return bucketed parameters, except those that were removed and converted afterwards."""
        held, kinds = self.held, self._kinds.expected
        pairs = zip(self._bucketed.items(), kinds, strict=True)
        return [(name, p) for (p, name), was in pairs if p in held or _kind(p) == was]

    def in_no_bucket(self) -> list[Parameter]:
        """Return parameters without a bucket that may be trained, including frozen ones."""
        others = [param for _, param in self.params if param not in self._bucketed]
        others = list(dict.fromkeys(others + self._registered))
        return [each for each in others if each.is_floating_point() or each.is_complex()]

    def expects(self, owner: nn.Module, part: nn.Module | Parameter) -> bool:
        """Return True if ``part``, which ``owner`` registers, adds parameters to the module."""
        if id(vars(owner).get("_parameters")) not in self._places:
            return False
        if not isinstance(part, nn.Module):
            self._registered.append(part)
            return True
        found = [param for _, param in parameters_of(part)]
        self._registered += found
        self._places.update(id(_table(each._parameters)) for each in part.modules())
        return bool(found)

    def refresh(self, where: Callable[[], str]) -> bool:
        """Return True if parameters were frozen, replaced, added or removed since the last call.

        A bucketed parameter that gets no more gradients counts as unused, which needs no action. A
        parameter in no bucket (:attr:`unplaced`) needs new buckets on all ranks.

        Args:
            where: returns this rank and its step, for error messages.

        Raises:
            NotImplementedError: an added parameter cannot be reduced.
            RuntimeError: see :meth:`check_swaps`.
        """
        self.check_swaps(where)
        if not self.look_for_changes() or self._takes_up_plain_parts():
            return False
        self._required = list(map(_requires_grad, self._looked_at))
        if self.look_for_changes():
            self.update()
        else:
            self._note_required()
        for name, param in self.unplaced:
            select(param.device)  # raises if there are no kernels
            if gradient_dtype(param) not in GRADIENT_DTYPES:
                self._held = []  # so that the next call finds it again
                raise NotImplementedError(
                    f"{where()}: parameter {name!r}, added after the module was wrapped, has "
                    f"gradients of dtype {gradient_dtype(param)}. Supported dtypes: "
                    f"{', '.join(map(str, GRADIENT_DTYPES))}"
                )
        if self.is_agreed:
            self.commit()
        return True

    def check_kinds(self, numbers: Collection[int], where: Callable[[], str]) -> None:
        """Raise if these parameters no longer match their buckets.

        ``numbers`` are indices into the parameters of :meth:`set_bucketed`.

        Raises:
            RuntimeError: the dtype or device of a parameter changed, and with it the autograd
                node that has our hooks; or its shape changed.
        """
        params = list(self._bucketed)
        if self._kinds.check_kinds(params):
            return
        for number in numbers:
            param, was = params[number], self._kinds.expected[number]
            if (now := _kind(param)) != was:
                raise RuntimeError(
                    f"{where()}: parameter {self._bucketed[param]!r} changed from {_in_words(was)} "
                    f"to {_in_words(now)} after the module was wrapped, so its gradient would not "
                    "be synchronized. Wrap the module again after such a change"
                )

    def check_swaps(self, where: Callable[[], str]) -> None:
        """Raise if the C++ tensor of a parameter changed since it was put in a bucket.

        Raises:
            RuntimeError: names the parameter. Its autograd node, with our hooks, belongs to the
                former tensor.
        """
        if self.swaps_seen == swaps[0]:
            return
        for param, tensor in zip(self._bucketed, self._tensors, strict=True):
            if tensor_behind(param) != tensor:
                raise RuntimeError(
                    f"{where()}: torch.utils.swap_tensors replaced the tensor of parameter "
                    f"{self._bucketed[param]!r} after the module was wrapped, so its gradient "
                    "would not be averaged. .to() calls swap_tensors for tensor subclasses; .to() "
                    "and load_state_dict() also call it after "
                    "torch.__future__.set_swap_module_params_on_conversion(True). Copy values into "
                    "the parameter instead, or delete this wrapper and wrap the module again after "
                    "swap_tensors. After replicate(), replicate a copy of the module"
                )
        self.swaps_seen = swaps[0]

    def update(self) -> None:
        """Read the parameters and buffers of all modules."""
        module = self.module
        modules = list(module.named_modules())
        found = self.ignored.parameters(module)
        # Modules store their parameters and submodules in such dictionaries. Comparing the contents
        # takes 0.06 us per entry, without a traversal of the modules.
        tables: list[Mapping[str, Any]] = [self._children]
        for _, each in modules:
            tables += (_table(each._parameters), _table(each._modules))
        self._contents = list(map(_values, filter(None, tables)))
        held = list(chain.from_iterable(self._contents))
        # Keep parameters that an override of named_parameters() no longer yields: stock asks once.
        left = set(map(id, held)).difference(id(param) for _, param in found)
        found += [each for each in self.params if id(each[1]) in left]
        # Inside torch.func.functional_call, tensors that are not Parameters replace them during
        # this forward. Gradients of tensors that were made from parameters go to the parameters.
        by_name = dict(self.params)
        stand_ins = {
            tensor
            for _, each in modules
            if isinstance(each._parameters, dict)  # TorchScript has other tables
            for tensor in each._parameters.values()
            if not (tensor is None or isinstance(tensor, Parameter))
        }
        self.params = [
            (name, by_name.get(name, param) if param in stand_ins else param)
            for name, param in found
            if param.is_leaf or name in by_name
        ]
        announced = sparse_parameters(module.modules())
        sparse_names = {name for name, param in found if param in announced}
        self.sparse = {param for name, param in self.params if name in sparse_names}
        self.module_buffers.update(modules)
        self._places = {id(_table(each._parameters)) for _, each in modules}
        self._registered = []
        self._empty_tables = {id(table): table for table in tables if not table}
        self._held = [] if stand_ins else held  # do not keep a graph alive
        self._sort()

    def _takes_up_plain_parts(self) -> bool:
        """Accept replaced submodules if old and new have no tensors; True if nothing else changed.

        Some forwards assign such a submodule each time: ``self.criterion = nn.MSELoss()``.
        """
        held = list(chain.from_iterable(self._contents))
        places = [*compress(count(), map(is_not, held, self._held))]
        pairs = [(held[place], self._held[place]) for place in places]
        if (
            len(held) != len(self._held)
            or any(self._empty_tables.values())
            or not all(_is_plain(now) and _is_plain(former) for now, former in pairs)
        ):
            return False
        for _, former in pairs:
            for table in (former._parameters, former._modules, former._buffers):
                self._empty_tables.pop(id(table), None)
            self._places.discard(id(former._parameters))
        # Tensors that the new submodules get later count as a change. A former submodule may still
        # be held under another name.
        changed = {id(part) for pair in pairs for part in pair}
        for each in (each for each in held if id(each) in changed):
            for table in (each._parameters, each._modules, each._buffers):
                self._empty_tables[id(table)] = table
            self._places.add(id(each._parameters))
        self._held = held
        return not self.look_for_changes()

    def commit(self) -> None:
        """Record that all ranks made the same change, so their buffers match, too."""
        self.is_agreed = self._holds_all = True
        self.ignored.agree(self.held)
        self.module_buffers.commit()

    def new(self) -> list[tuple[str, Parameter]]:
        """Return :attr:`unplaced` parameters added since :meth:`commit`; ranks may differ."""
        return [each for each in self.unplaced if each[1] not in self.ignored.reduced]

    def _sort(self) -> None:
        self._looked_at = [param for _, param in self.params]
        self._holds_all = self._bucketed.keys() & self.ignored.reduced <= self.held
        self._schemas.clear()
        self._required = list(map(_requires_grad, self._looked_at))
        self._note_required()

    def _note_required(self) -> None:
        """Update what depends on ``requires_grad``, when perhaps nothing else has changed."""
        self.trainable = list(compress(self.params, self._required))
        self.unplaced = [each for each in self.trainable if each[1] not in self._bucketed]
        self.is_agreed = self._holds_all and not self.unplaced
        key = tuple(self._required)
        if key not in self._schemas:
            if len(self._schemas) == _MOST_SCHEMAS:
                self._schemas.clear()
            sparse = [f"sparse {name}" for name in self.names_of_sparse()]
            same = self.trainable
            if self.keeps_frozen:
                pairs = zip(self.params, self._required, strict=True)
                same = [each for each, needs in pairs if needs or each[1] in self._bucketed]
            self._schemas[key] = schema_of(same, f"wrapper {self.number}", *sparse)
        self.schema = self._schemas[key]

    def schema_of_change(self) -> bytes:
        """Return a hash of the trainable parameters and of :attr:`unplaced`."""
        return schema_hash([self.schema.hex(), *(name for name, _ in self.unplaced)])

    def names_of_sparse(self) -> list[str]:
        """Return names of the trainable parameters whose gradients are expected to be sparse."""
        return [name for name, param in self.trainable if param in self.sparse]

    def look_for_changes(self) -> bool:
        """Return True if anything has changed since the last :meth:`refresh`."""
        required = list(map(_requires_grad, self._looked_at))
        if (
            self.swaps_seen != swaps[0]
            or required != self._required
            or any(self._empty_tables.values())
        ):
            return True
        held = list(chain.from_iterable(self._contents))
        return len(held) != len(self._held) or not all(map(is_, held, self._held))

    def buffers(self) -> list[tuple[str, Tensor]]:
        """See :meth:`ModuleBuffers.named`."""
        return self.module_buffers.named(self.is_agreed)

    def verify(
        self, where: str, requested: Sequence[tuple[str, Tensor]] | None, error: Mismatch
    ) -> NoReturn:
        """Explain, together with all ranks, why they reduce different gradients.

        ``requested`` are the parameters of a reduction on request, ``None`` in a backward.

        Raises:
            RuntimeError: always; it names the difference.
        """
        kind = type(self.module).__name__
        options = {
            "new parameters": [name for name, _ in self.unplaced],
            "sparse gradients": self.names_of_sparse(),
            "wrapper": f"number {self.number} in its process group, of a {kind}",
            "reduction": "of a backward" if requested is None else "on request (reduce_gradients)",
            **error.options,
        }
        params = self.params if requested is None else requested
        # Forget the module's contents: at the next forward each rank looks for changes again.
        self._held = []
        description = describe(params, self.buffers(), options)
        advice = f"{error.advice} {TRAIN_THE_SAME}".lstrip()
        verify_same(description, self._group, params[0][1].device, where, advice)
        raise RuntimeError(
            f"{where}: another rank reduced different gradients at the same time. Call the wrapped "
            "modules in the same order on all ranks"
        )


def _is_plain(part: Any) -> bool:
    """Return True if this is a module without parameters, buffers and submodules."""
    return (
        isinstance(part, nn.Module)
        and isinstance(part._parameters, dict)  # TorchScript has other tables
        and not (part._parameters or part._modules or part._buffers)
    )


def schema_of(named_params: Sequence[tuple[str, Tensor]], *more: str) -> bytes:
    """Return a hash of the parameters, and of ``more`` that should match on all ranks."""
    parts = [
        f"{name} {tuple(param.shape)} {param.dtype} {gradient_dtype(param)}"
        for name, param in named_params
    ]
    return schema_hash([*parts, *more])


def _in_words(kind: tuple[Any, ...]) -> str:
    shape, dtype, device, layout = kind
    return f"{dtype} on {device}, {tuple(shape)}" + f" {layout}" * (layout is not torch.strided)


class _ScriptedTable(Mapping[str, Any]):
    """Parameters, buffers or submodules of a TorchScript module, which has no dictionaries."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.keys())

    def __len__(self) -> int:
        return len(self._table)


def _table(table: Any) -> Mapping[str, Any]:
    return table if isinstance(table, dict) else _ScriptedTable(table)
