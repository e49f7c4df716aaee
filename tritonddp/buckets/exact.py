"""Which gradients are not quantised (``exact``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

# Parameters of fewer elements are not worth an error: there are few of them, and they matter.
_SMALL = 1_024


class Exact:
    """Finds the parameters of a module whose gradients travel in fp32 beside quantised ones.

    These are: all of one dimension (biases, scales of norms), those of fewer than 1,024 elements,
    the weights of embeddings, in whose gradients many rows are zero, and what the user wants.

    Args:
        module: what is wrapped.
        wanted: names of further parameters as ``module.named_parameters()`` gives them, or patterns
            of such names (:mod:`fnmatch`), one or several; or ``wanted(name, parameter)``, true of
            what shall be exact.

    Raises:
        TypeError: ``wanted`` is none of these.
        ValueError: no parameter has a name, or matches a pattern, that is given.
    """

    def __init__(self, module: nn.Module, wanted: Any = None) -> None:
        self._module = module
        self._asks: Callable[[str, Tensor], Any] | None = None
        self._patterns: tuple[str, ...] = ()
        if callable(wanted):
            self._asks = wanted
        elif wanted is not None:
            self._patterns = _patterns_of(wanted)
            names = [name for name, _ in module.named_parameters()]
            for pattern in self._patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ValueError(
                        f"exact: the module has no parameter {pattern!r}. Give names as its "
                        f"named_parameters() has them ({(names or ['none'])[0]!r}), or patterns"
                    )

    def find(self, names: Sequence[str], params: Sequence[Tensor]) -> list[bool]:
        """For each of these parameters, whether its gradient is exact."""
        embeddings = {
            layer.weight
            for layer in self._module.modules()
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        }
        return [
            param.dim() < 2
            or param.numel() < _SMALL
            or param in embeddings
            or any(fnmatchcase(name, pattern) for pattern in self._patterns)
            or (self._asks is not None and bool(self._asks(name, param)))
            for name, param in zip(names, params, strict=True)
        ]


def _patterns_of(wanted: Any) -> tuple[str, ...]:
    if isinstance(wanted, str):
        return (wanted,)
    if isinstance(wanted, Iterable) and not isinstance(wanted, bytes | Tensor):
        patterns = tuple(wanted)
        if all(isinstance(pattern, str) for pattern in patterns):
            return patterns
    raise TypeError(
        "exact should be a name or pattern, several of them, or a function of name and parameter, "
        f"got {wanted!r}"
    )
