"""Uneven inputs: a rank that has run out of them makes the collectives of those that go on.

Inside torch's ``Join``, for each forward of the ranks that have inputs::

    forward           has inputs                      has none left
    notify            Join.notify_join_context        Join counts those that have inputs
    what will come    JoinProtocol.announce           JoinProtocol.receive
    buffers           broadcast, if any rank says so  the same
    backward          buckets, as always              shadow_backward: zeros, and all flags 0

The headers say which ranks had none (``GradSource.JOINED``), so a mean over those that had needs no
collective of its own. When none has inputs any more, all get the model of one that left last.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import Parameter

from tritonddp._torch import CountingJoin, leave_join, throws_on_early_termination
from tritonddp.comm.broadcast import StateBroadcast
from tritonddp.coordination.agreement import GradSource
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.features.join_protocol import JoinProtocol
from tritonddp.reducer.extension import SyncState
from tritonddp.reducer.recovery import shadow_backward
from tritonddp.reducer.reducer import Reducer


class Wrapper(Protocol):
    """What is needed here of a wrapped module, beside what torch's ``Joinable`` has."""

    group: Group
    sync: SyncState
    device: torch.device
    core: Reducer
    state_broadcast: StateBroadcast
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _divide_by_initial_world_size: bool
    _authoritative_rank: int

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with a broadcast of module buffers."""

    def _sync_buffers(self) -> None:
        """Broadcast module buffers."""


class UnevenInputs(CountingJoin):
    """torch's ``Join`` of one wrapped module, which first brings what is under way to its end."""

    @property
    def _ddp(self) -> Any:
        return self._joinables[0]

    def counting(self) -> AbstractContextManager[None]:
        """Names who is missing when this rank waits for those that have inputs."""
        return _counting(self._ddp)

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ddp = self._ddp
        try:
            if type is None and ddp.sync.join is not None:
                ddp.core.settle_and_refresh()
                _make_up(ddp)
            super().__exit__(type, value, traceback)
        finally:
            _leave(ddp)


class ShadowHook(JoinHook):
    """What torch's ``Join`` runs on a rank that has no inputs left.

    Between two iterations ``.grad`` holds what the other ranks have reduced, ``None`` where none
    has a gradient: an optimizer that joins too (``ZeroRedundancyOptimizer``) steps with it. What
    this rank had comes back in the end, or the next loop would add its gradients to another's.
    """

    def __init__(self, ddp: Wrapper, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._ddp = ddp
        self._own: dict[Parameter, Tensor | None] = {}
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Make the collectives of one forward and, if it is reduced, of its backward."""
        ddp = self._ddp
        ddp.core.settle_and_refresh()
        join: JoinProtocol = ddp.sync.join
        join.mean_over_present = not ddp._divide_by_initial_world_size
        reduces = join.receive(_coming(ddp), ddp.core.parameters.schema)
        if join.differs:
            _train_the_same(ddp, is_present=False)
        for param in [*ddp.core.manager.current.params, *(p for _, p in ddp.core.parameters.added)]:
            if param not in self._own:
                # A copy: what lies in a bucket is about to be overwritten.
                grad = param.grad
                self._own[param] = None if grad is None else grad.detach().clone()
            param.grad = None
        if join.syncs_buffers:
            ddp._sync_buffers()
        ddp.require_forward_param_sync = reduces  # as on the ranks whose forward this is
        if reduces:
            shadow_backward(ddp.core, GradSource.JOINED)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model over from the rank that left last, of several from the highest."""
        ddp = self._ddp
        ddp.core.settle_and_refresh()
        for param, grad in self._own.items():
            param.grad = grad
            ddp.core.own_gradients_at = ddp.core.counters.reductions
        where = f"{ddp.core.where()}, end of join()"
        ddp.sync.join.agree_on_last(where, is_last_joiner)
        ddp._authoritative_rank = ddp.sync.source_rank
        buffers = ddp.core.parameters.buffers() if ddp.forward_sync_buffers else []
        held = [*ddp.core.parameters.params, *buffers]
        _verify_held(ddp, held, where)
        ddp.state_broadcast.send(
            [tensor.detach() for _, tensor in held],
            f"step {ddp.core.counters.reductions}, end of join()",
            "parameters and buffers",
        )
        _leave(ddp)


def announce_forward(ddp: Wrapper) -> None:
    """A forward begins: tell the ranks that have no inputs which collectives it will bring."""
    _make_up(ddp)
    protocol: JoinProtocol = ddp.sync.join
    # Where a rank without inputs ends the loop, that is an error of its own.
    with nullcontext() if throws_on_early_termination(ddp) else _counting(ddp):
        notified = Join.notify_join_context(cast(Joinable, ddp))
    protocol.mean_over_present = not ddp._divide_by_initial_world_size
    protocol.announce(
        _coming(ddp),
        ddp.core.parameters.schema,
        reduces=torch.is_grad_enabled() and ddp.sync.enabled,
        syncs_buffers=ddp.will_sync_module_buffers(),
    )
    if notified is not None:
        with _counting(ddp):
            notified.wait()
    if protocol.differs:
        _train_the_same(ddp, is_present=True)
    if ddp.forward_sync_buffers and ddp.core.parameters.buffers():
        ddp.require_forward_param_sync = protocol.syncs_buffers


def refuse_inside(ddp: Wrapper, what: str) -> None:
    """Raise a RuntimeError inside ``join``: ranks without inputs could not follow."""
    if ddp.sync.join is not None and not throws_on_early_termination(ddp):
        raise RuntimeError(
            f"{ddp.core.where()}: {what} inside join(): a rank that has no inputs left would not "
            "take part. Call it after join()"
        )


def _make_up(ddp: Wrapper) -> None:
    """If no backward has followed the last forward: ranks without inputs wait for it."""
    if ddp.sync.join.is_due:
        shadow_backward(ddp.core, GradSource.SKIPPED)


def _train_the_same(ddp: Wrapper, is_present: bool) -> None:
    """Loops freeze and unfreeze parameters; a rank that has left its loop follows the others."""
    params = ddp.core.parameters.params
    _verify_held(ddp, params, _coming(ddp))
    required = torch.tensor(
        [param.requires_grad for _, param in params], dtype=torch.uint8, device=ddp.device
    )
    source_rank = ddp.sync.source_rank
    ddp.group.broadcast(required, source_rank, _coming(ddp), "broadcast of what is frozen")
    if not is_present:
        for (_, param), trains in zip(params, required.tolist(), strict=True):
            param.requires_grad_(bool(trains))
        ddp.core.settle_and_refresh()


def _verify_held(ddp: Wrapper, named_tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Do all ranks hold the same tensors, trainable or not?"""
    held = [(name, tensor.detach()) for name, tensor in named_tensors]
    verify_same(describe(held, [], {}), ddp.group, ddp.device, where)


def _leave(ddp: Wrapper) -> None:
    # A forward without a backward has armed the reduction on the ranks that had inputs only.
    ddp.core.forwards.reduction_begins()
    leave_join(ddp)


def _counting(ddp: Wrapper) -> AbstractContextManager[None]:
    return ddp.group.guard(_coming(ddp), "count of the ranks that have inputs, inside join()")


def _coming(ddp: Wrapper) -> str:
    """Before the collectives of a forward, on the ranks that have no inputs too."""
    return f"rank {ddp.group.rank}, step {ddp.core.counters.reductions + 1}, forward"
