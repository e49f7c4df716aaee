"""Parameters and buffers that stay rank-local (``_ddp_params_and_buffers_to_ignore``)."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter


def parameters_of(module: nn.Module, ignored: Collection[str] = ()) -> list[tuple[str, Parameter]]:
    """Return each parameter of ``module`` once, with its first name that is not ignored.

    Like stock DDP, ask each submodule for its own parameters: it may override
    ``named_parameters()``.
    """
    found: dict[Parameter, str] = {}
    for prefix, part in module.named_modules():
        for key, param in part.named_parameters(recurse=False):
            name = _joined(prefix, key)
            if name not in ignored:
                found.setdefault(param, name)
    return [(name, param) for param, name in found.items()]


class Ignored:
    """Tensors that the wrapper leaves to each rank. Decided once, at wrapping, as in stock DDP.

    An ignored tensor stays ignored under any later name: its module may be pruned, compiled or put
    in an ``nn.Sequential``. The same holds for reduced parameters. A parameter that is added later
    is ignored if its name is in the list. It is also ignored if it is added to a submodule that
    directly holds ignored parameters (``weight_norm`` replaces one), or to a submodule whose
    parameters were all ignored (another layer of an expert, a LoRA wrapped around it).

    Args:
        module: the wrapped module.
        names: names of its ignored parameters and buffers. New names may be added to the
            collection.

    Attributes:
        names: see above.
        reduced: parameters of the module that are not ignored, at the last agreement of all ranks.
        syncs_buffers: the module had buffers that are not ignored. If it had none, buffers that
            it gets later stay rank-local, as in stock DDP.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self.names = names
        self.syncs_buffers = any(name not in names for name, _ in module.named_buffers())
        self._forget()
        self._decide(module)

    def _forget(self) -> None:
        self.reduced: Collection[Tensor] = ()
        self._tensors: set[Tensor] = set()  # parameters that were ignored at wrapping
        self._later: set[Tensor] = set()  # ignored ones added later, still present
        self._parts: dict[int, weakref.ref[nn.Module]] = {}  # without reduced parameters, by id
        # For each dictionary with ignored tensors, by id: its keys, and whether each is ignored.
        self._keys: dict[int, dict[str, bool]] = {}
        self._tables: list[Mapping[str, Tensor | None]] = []  # these dictionaries, kept alive
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
                    continue  # a table of TorchScript
                keys = {key: _joined(prefix, key) in self.names for key in table}
                if any(keys.values()):
                    self._keys[id(table)] = keys
                    self._tables.append(table)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies of the wrapper: names decide again for their new tensors."""
        return {"names": self.names, "syncs_buffers": self.syncs_buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def agree(self, reduced: Collection[Tensor]) -> None:
        """Record that all ranks hold and reduce these parameters."""
        self.reduced = reduced

    def parameters(self, module: nn.Module) -> list[tuple[str, Parameter]]:
        """Return the parameters that are not ignored; see :func:`parameters_of`."""
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
        """Return the current ``named_buffers()``, as in stock DDP, without ignored ones."""
        named: Iterable[tuple[str, Tensor]] = module.named_buffers()
        if not self.names:
            return list(named)
        ignored = set(self.names)
        for prefix, part in module.named_modules():
            keys = self._keys.get(id(part._buffers), {})
            ignored.update(_joined(prefix, key) for key, is_ignored in keys.items() if is_ignored)
        return [each for each in named if each[0] not in ignored]

    def _is_of_local(self, param: Tensor, prefix: str, parts: Mapping[str, nn.Module]) -> bool:
        """Return True if ``param`` was ignored, or is in a submodule that holds ignored ones."""
        if param in self._tensors or param in self._later:
            return True
        names = prefix.split(".")
        around = [parts.get(".".join(names[:end])) for end in range(1, len(names) + 1)]
        held = [part for part in around if part is not None]
        return any(id(part._parameters) in self._keys or self._is_local(part) for part in held)

    def _is_local(self, part: nn.Module) -> bool:
        """Return True if this submodule has known parameters, and all are ignored."""
        former = self._parts.get(id(part))
        if former is not None and former() is part:
            return True
        held = [param for _, param in parameters_of(part)]
        is_ignored = any(param in self._tensors or param in self._later for param in held)
        return is_ignored and not any(param in self.reduced for param in held)


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
