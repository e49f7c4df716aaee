"""Which parameters and buffers stay with each rank (``_ddp_params_and_buffers_to_ignore``)."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter


def parameters_of(module: nn.Module, ignored: Collection[str] = ()) -> list[tuple[str, Parameter]]:
    """The parameters of ``module``, each once, with the first of its names that is not ignored.

    As stock DDP, which asks each submodule for its own: they may override ``named_parameters()``.
    """
    found: dict[Parameter, str] = {}
    for prefix, part in module.named_modules():
        for key, param in part.named_parameters(recurse=False):
            name = _joined(prefix, key)
            if name not in ignored:
                found.setdefault(param, name)
    return [(name, param) for param, name in found.items()]


class Ignored:
    """What the wrapper leaves to each rank. It is decided once, at wrapping, as in stock DDP.

    A tensor that is ignored stays ignored, whatever its name becomes: its module may be pruned,
    compiled or put in an ``nn.Sequential`` later. The same holds for what is reduced. A parameter
    that the module gets later is ignored if its name is in the list, or if it comes into a part
    that holds ignored parameters itself (``weight_norm`` replaces one), or into one that has had no
    others (another layer of an expert, a LoRA around it).

    Args:
        module: the wrapped module.
        names: of its parameters and buffers that are ignored. New names may be added to it.

    Attributes:
        names: see above.
        reduced: what the module held when all ranks last agreed, without what is ignored.
        syncs_buffers: the module had buffers that are not ignored. As in stock DDP a module that
            had none keeps to each rank what it gets later.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self.names = names
        self.syncs_buffers = any(name not in names for name, _ in module.named_buffers())
        self._forget()
        self._decide(module)

    def _forget(self) -> None:
        self.reduced: Collection[Tensor] = ()
        self._tensors: set[Tensor] = set()  # parameters that were ignored at wrapping
        self._later: set[Tensor] = set()  # those that have come since, and are still there
        self._parts: dict[int, weakref.ref[nn.Module]] = {}  # without reduced parameters, by id
        # Of each dictionary with ignored tensors, by its id: the keys, and whether that is ignored.
        self._keys: dict[int, dict[str, bool]] = {}
        self._tables: list[Mapping[str, Tensor | None]] = []  # these dictionaries
        self._is_decided = False

    def _decide(self, module: nn.Module) -> None:
        self._is_decided = True
        if not self.names:
            return
        self.reduced = reduced = {param for _, param in parameters_of(module, self.names)}
        self._tensors.update(p for _, p in parameters_of(module) if p not in reduced)
        for prefix, part in module.named_modules():
            if self._is_local(part):
                self._parts[id(part)] = weakref.ref(part)
            for table in (part._parameters, part._buffers):
                if not isinstance(table, dict):
                    continue  # TorchScript's
                keys = {key: _joined(prefix, key) in self.names for key in table}
                if any(keys.values()):
                    self._keys[id(table)] = keys
                    self._tables.append(table)

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the wrapper, whose tensors are others: their names decide again."""
        return {"names": self.names, "syncs_buffers": self.syncs_buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def agree(self, reduced: Collection[Tensor]) -> None:
        """All ranks hold these parameters, and reduce them."""
        self.reduced = reduced

    def parameters(self, module: nn.Module) -> list[tuple[str, Parameter]]:
        """See :func:`parameters_of`: those that are not ignored."""
        if not self._is_decided:
            self._decide(module)
        if not self.names:
            return parameters_of(module)
        parts = dict(module.named_modules())
        found: dict[Parameter, str] = {}
        renamed: dict[Parameter, str] = {}
        later: set[Tensor] = set()
        for prefix, part in parts.items():
            keys = self._keys.get(id(part._parameters), {})
            for key, param in part.named_parameters(recurse=False):
                name = _joined(prefix, key)
                is_ignored = name in self.names or keys.get(key, False)
                if param in self.reduced:
                    (renamed if is_ignored else found).setdefault(param, name)
                elif is_ignored or (key not in keys and self._is_of_local(param, prefix, parts)):
                    if isinstance(param, Parameter):  # not the stand-in of a functional call
                        later.add(param)
                else:
                    found.setdefault(param, name)
        self._later = later
        for param, name in renamed.items():
            found.setdefault(param, name)
        return [(name, param) for param, name in found.items()]

    def buffers(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """What ``named_buffers()`` says now, as in stock DDP, without what is ignored."""
        named: Iterable[tuple[str, Tensor]] = module.named_buffers()
        if not self.names:
            return list(named)
        ignored = set(self.names)
        for prefix, part in module.named_modules():
            keys = self._keys.get(id(part._buffers), {})
            ignored.update(_joined(prefix, key) for key, is_ignored in keys.items() if is_ignored)
        return [each for each in named if each[0] not in ignored]

    def _is_of_local(self, param: Tensor, prefix: str, parts: Mapping[str, nn.Module]) -> bool:
        """Whether ``param``, in the part of this name, was ignored, or belongs to such a part."""
        if param in self._tensors or param in self._later:
            return True
        names = prefix.split(".")
        around = [parts.get(".".join(names[:end])) for end in range(1, len(names) + 1)]
        held = [part for part in around if part is not None]
        return any(id(part._parameters) in self._keys or self._is_local(part) for part in held)

    def _is_local(self, part: nn.Module) -> bool:
        """Whether all parameters of this part that are known are ignored, and there are some."""
        former = self._parts.get(id(part))
        if former is not None and former() is part:
            return True
        held = [param for _, param in parameters_of(part)]
        is_ignored = any(param in self._tensors or param in self._later for param in held)
        return is_ignored and not any(param in self.reduced for param in held)


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
