"""Buckets that are not sent before the gradient of a given parameter is ready.

(``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce``.) They wait only if the autograd
engine says that the backward will reach that parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonddp._torch import register_post_accumulate_grad_hook
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.group import Group
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward
from tritonddp.reducer.graph.participation import gradient_nodes, will_engine_execute


@dataclass(frozen=True)
class Delay:
    """The delayed parameters, and the parameter that they wait for."""

    params: tuple[Tensor, ...]
    names: frozenset[str]  # as the module has them
    until: Tensor  # the parameter whose gradient has to be there first

    @classmethod
    def of(
        cls,
        delayed: Iterable[tuple[str, Tensor]] | None,
        until: Tensor | None,
        named_params: Sequence[tuple[str, Tensor]],
    ) -> Delay | None:
        """From the constructor's arguments, whose names are ignored; ``None`` if not given."""
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


class DeferredBuckets(Extension):
    """Holds back the buckets of delayed parameters until the gradient of ``until`` is ready.

    Args:
        until: the parameter to wait for, if a backward reaches it.
        names: names of the delayed parameters.
        launching: a context that is held while buckets are launched.
        group: all ranks.
    """

    def __init__(
        self,
        until: Tensor,
        names: frozenset[str],
        launching: AbstractContextManager[Any],
        group: Group,
    ) -> None:
        self._nodes = gradient_nodes([until])
        self._names = names
        self._launching, self._group = launching, group
        self._waits: Backward | None = None
        # A parameter keeps its hooks alive, and a graph node keeps its parameter alive. So the hook
        # must not keep this object, which holds the node, alive: that would be a cycle.
        reference = weakref.ref(self)

        def gradient_ready(_: Tensor) -> None:
            deferred = reference()
            if deferred is not None:
                deferred._release()

        hook = register_post_accumulate_grad_hook(until, gradient_ready)
        weakref.finalize(self, hook.remove).atexit = False

    def on_begin(self, backward: Backward) -> None:
        """Hold the buckets back, if this backward reaches the parameter."""
        self._waits, reduction = None, backward.reduction
        if reduction is None or backward.is_provisional:
            return
        if will_engine_execute(self._nodes) == [True]:
            self._waits = backward
            for index in self._delayed(reduction):
                reduction.hold(index)

    def on_close(self, reduction: Reduction | None) -> None:
        self._waits = None

    def _release(self) -> None:
        """The gradient is ready: launch the buckets that are full."""
        backward, self._waits = self._waits, None
        if backward is not None and backward.runs and backward.reduction is not None:
            with self._launching, self._group.uninterrupted(), torch.no_grad():
                for index in self._delayed(backward.reduction):
                    backward.reduction.resume(index)
                backward.reduction.launch_ready()

    def _delayed(self, reduction: Reduction) -> list[int]:
        return [each.index for each in reduction.buckets if each.names[0] in self._names]
