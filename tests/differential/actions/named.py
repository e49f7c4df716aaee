"""A step of a named program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from differential.named import PROGRAMS, Named
from differential.program import Action
from tritonddp import DistributedDataParallel

if TYPE_CHECKING:
    from differential.player import Player


class NamedStep(Action):
    """One step of a named program, up to its gradients."""

    name: str  # of PROGRAMS
    step: int
    drops: bool = True  # whether the gradients of the step before are dropped
    accumulates: bool = False  # whether a microbatch runs before each reduced backward

    def perform(self, player: Player) -> None:
        program, nets = PROGRAMS[self.name], [*player.wrapped.values()]
        if self.drops:
            for net in nets:
                net.zero_grad()
        is_plain = not self.accumulates
        with contextlib.nullcontext() if is_plain else _microbatches(program, nets, player.rank):
            program.step(nets[0] if len(nets) == 1 else nets, player.rank, self.step)
        player.see_gradients()
        for net, count in zip(nets, program.reductions, strict=True):
            if isinstance(net, DistributedDataParallel):
                assert net.reducer.counters.reductions == count * (self.step + 1)


@contextlib.contextmanager
def _microbatches(program: Named, nets: Sequence[Any], rank: int) -> Iterator[None]:
    """Before each reduced ``backward()``, a forward and a backward under ``no_sync``."""
    original: Callable[..., None] = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for net in nets:
            if net.require_backward_grad_sync:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(net.no_sync())
                    if program.weighted:
                        stack.enter_context(net.weighted(0.5 + rank, program.weighted))
                    original(net.module.microbatch(net, rank))
        original(loss, *args, **kwargs)

    Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.backward = original  # type: ignore[method-assign]
