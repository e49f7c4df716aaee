"""Gradients that are not sent before that of another parameter is there.

(``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce``.) Delayed parameters have a
bucket of their own for each dtype and device, which comes last in the launch order, and waits for
the gradient of one more parameter. For that one to be anywhere, in the module or not, a backward is
asked whether it will reach it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tritonddp._torch import gradient_node, register_post_accumulate_grad_hook, will_engine_execute


@dataclass(frozen=True)
class Delay:
    """What is delayed, and until when.

    Attributes:
        params: those that are delayed.
        names: their names, as the module has them.
        until: the parameter whose gradient has to be there first.
    """

    params: tuple[Tensor, ...]
    names: frozenset[str]
    until: Tensor

    @classmethod
    def of(
        cls,
        delayed: Iterable[tuple[str, Tensor]] | None,
        until: Tensor | None,
        named_params: Sequence[tuple[str, Tensor]],
    ) -> Delay | None:
        """From the constructor's arguments; ``None`` if they are not given.

        Args:
            delayed: ``delay_all_reduce_named_params``. Their names do not matter.
            until: ``param_to_hook_all_reduce``.
            named_params: all parameters that are to be synchronised.

        Raises:
            TypeError: they are no parameters with their names, or no parameter.
            ValueError: only one of the arguments is given, or a parameter is not one of the module.
        """
        if (delayed is None) != (until is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
                "same time."
            )
        if delayed is None or until is None:
            return None
        names: dict[Tensor, str] = {param: name for name, param in named_params}
        wanted = [*delayed] if isinstance(delayed, Iterable) else [delayed]
        pairs = [each for each in wanted if isinstance(each, tuple | list) and len(each) == 2]
        if len(pairs) < len(wanted) or not all(isinstance(param, Tensor) for _, param in pairs):
            raise TypeError(
                "delay_all_reduce_named_params should be a list of names and parameters, got "
                f"{delayed!r}"
            )
        if not isinstance(until, Tensor):
            raise TypeError(f"param_to_hook_all_reduce should be a parameter, got {until!r}")
        strange = [str(name) for name, param in wanted if param not in names]
        if strange:
            raise ValueError(
                "delay_all_reduce_named_params names parameters that are none of the wrapped "
                f"module's: {', '.join(strange[:10])}{', ...' if len(strange) > 10 else ''}"
            )
        params = tuple(param for _, param in wanted)
        return cls(params, frozenset(names[param] for param in params), until)


class Listener(Protocol):
    """Who is told; referred to weakly."""

    def gate_opens(self) -> None:
        """The gradient that is waited for has come."""


class Gate:
    """Open, unless a backward runs that will yet reach the parameter that is waited for.

    Args:
        until: that parameter.
        listener: told when its gradient has come.
    """

    def __init__(self, until: Tensor, listener: Listener) -> None:
        self._node = gradient_node(until)
        self._is_shut = False
        self._listener = weakref.ref(listener)
        # A parameter holds its hooks, and a node its parameter: the hook must not hold the node.
        reference = weakref.ref(self)

        def came(_: Tensor) -> None:
            gate = reference()
            if gate is not None:
                gate._open()

        hook = register_post_accumulate_grad_hook(until, came)
        weakref.finalize(self, hook.remove).atexit = False

    def begin(self) -> bool:
        """A backward begins; returns whether the gate is shut."""
        self._is_shut = will_engine_execute([self._node]) == [True]
        return self._is_shut

    def _open(self) -> None:
        told = self._listener()
        if self._is_shut and told is not None:
            self._is_shut = False
            told.gate_opens()
