"""Uneven inputs: a rank without inputs makes the same collectives as the ranks that have some.

Inside torch's ``Join``, for each forward of the ranks that have inputs::

    step of a forward  rank with inputs                rank without inputs
    count              Join.notify_join_context        Join counts the ranks that have inputs
    announcement       JoinProtocol.announce           JoinProtocol.receive
    buffers            broadcast, if any rank says so  the same
    backward           buckets, as always              shadow_backward: zeros, and all flags 0

The header that each rank sends in the reduction says whether it had inputs (else
``GradSource.JOINED``), so a mean over the ranks with inputs needs no further collective. When no
rank has inputs any more, all get the model of a rank that left last.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import Parameter

from tritonddp._torch import CountingJoin, leave_join, throws_on_early_termination
from tritonddp.coordination.agreement import GradSource
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.reducer import capture

# Flags of a rank's announcement. A rank without inputs sends 0.
_PRESENT = 1
_REDUCES = 2
_SYNCS_BUFFERS = 4
_OVER_PRESENT = 8
_ADOPTS = 16


class JoinProtocol:
    """What the ranks agree on before each forward inside torch's ``Join``.

    The host waits for the answer, on a GPU too, as stock DDP does where there are buffers.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.is_open = False  # forwards run inside Join
        self.is_due = False  # a forward has announced a reduction that has not begun yet
        # Means without weights are over the ranks that have inputs, not over all ranks.
        self.mean_over_present = False
        # All ranks take over the buffers and the gradient order of this rank: as in stock, the
        # highest rank that has inputs.
        self.source_rank = 0
        self.syncs_buffers = False  # some rank wants to synchronise module buffers
        self.differs = False  # ranks train different parameters
        self.adopts = False  # the forward adopts parameters that have come or gone

    def reduction_begins(self) -> None:
        """The announced reduction begins: forwards from now on announce another one."""
        self.is_due = False

    def announce(
        self, where: str, schema: bytes, reduces: bool, syncs_buffers: bool, adopts: bool
    ) -> None:
        """Tell that this rank has inputs, and which collectives its forward and backward make.

        ``where`` is this rank and its step, for errors, and ``schema`` a hash of its trainable
        parameters. Raises a RuntimeError, as the methods below do, if the ranks are about to make
        different collectives.
        """
        self.is_open = True
        flags = _PRESENT + _REDUCES * reduces + _SYNCS_BUFFERS * syncs_buffers
        flags += _OVER_PRESENT * self.mean_over_present + _ADOPTS * adopts
        self.is_due = self._agree(where, flags, schema)

    def reduces_backward(self, is_enabled: bool, where: str) -> bool:
        """Whether a backward that begins now is the one that a forward has announced."""
        if not self.is_due and is_enabled:
            raise RuntimeError(
                f"{where}: a backward inside join() that no forward has announced. Ranks without "
                "inputs follow one reduced backward after each forward that runs outside "
                "no_sync(): run the forward of this backward outside no_sync() too; put all but "
                "the first backward of a forward, and those without a forward, under no_sync()"
            )
        return self.is_due

    def receive(self, where: str, schema: bytes) -> bool:
        """Tell that this rank has no inputs; returns whether the others reduce a backward."""
        return self._agree(where, 0, schema)

    def agree_on_last(self, where: str, is_last: bool) -> None:
        """When no rank has inputs: make the highest of the ranks that ended last the source."""
        what = "agreement on whose model all take over"
        self._agree(where, _PRESENT * is_last, b"", what)

    def _agree(
        self, where: str, mine: int, schema: bytes, what: str = "announcement of a forward"
    ) -> bool:
        rows = [(0, 0)] * self._group.size
        rows[self._group.rank] = mine, int.from_bytes(schema, "little")
        message = torch.tensor(rows, dtype=torch.int32, device=self._device)
        self._group.all_reduce(message, where, f"{what} inside join()")
        flags, schemas = message.T.tolist()
        present = [number for number, each in enumerate(flags) if each]
        if len({flags[number] & _OVER_PRESENT for number in present}) > 1:
            raise RuntimeError(
                f"{where}: join(divide_by_initial_world_size=...) is not the same on all ranks"
            )
        self.source_rank = max(present, default=0)
        self.syncs_buffers = any(each & _SYNCS_BUFFERS for each in flags)
        self.differs = len(set(schemas)) > 1
        self.adopts = any(each & _ADOPTS for each in flags)
        reduces = {flags[number] & _REDUCES for number in present}
        if len(reduces) > 1:
            raise RuntimeError(
                f"{where}: inside join() ranks must agree on which forwards have a backward "
                f"that is reduced. This one: {_in_words(flags)}. Run the same forwards under "
                "no_sync() or torch.no_grad() on every rank"
            )
        return reduces == {_REDUCES}


def _in_words(flags: list[int]) -> str:
    return "; ".join(
        f"rank {rank}: "
        + ("has no inputs left" if not each else "yes" if each & _REDUCES else "no")
        for rank, each in enumerate(flags)
    )


class Wrapper(Protocol):
    """What this file needs of a wrapper, beside what ``Joinable`` has."""

    _ddp_state: Any
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _divide_by_initial_world_size: bool
    _authoritative_rank: int

    def will_sync_module_buffers(self) -> bool: ...
    def _sync_buffers(self) -> None: ...
    def _adopt_parameters(self) -> None: ...


class UnevenInputs(CountingJoin):
    """torch's ``Join`` for one wrapped module. On exit it first ends the reduction under way."""

    @property
    def _ddp(self) -> Any:
        return self._joinables[0]

    def counting(self) -> AbstractContextManager[None]:
        """Context: an error of the count of ranks that have inputs names the missing rank."""
        return _counting(self._ddp)

    def __exit__(self, *error: Any) -> None:
        ddp = self._ddp
        state = ddp._ddp_state
        try:
            if error[0] is None and state.sync.join is not None:
                state.core.settle_and_refresh()
                _make_up(ddp)
            super().__exit__(*error)
        finally:
            _leave(ddp)


class ShadowHook(JoinHook):
    """What torch's ``Join`` runs on a rank that has no inputs left.

    Between two iterations ``.grad`` holds the reduced gradients of the other ranks, ``None`` where
    no rank has a gradient: an optimizer that joins too (``ZeroRedundancyOptimizer``) steps with
    them. At the end this rank's own gradients are restored; otherwise its next loop would add its
    gradients to those of other ranks.
    """

    def __init__(self, ddp: Wrapper, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._ddp = ddp
        self._own: dict[Parameter, Tensor | None] = {}
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Make the collectives of one forward and, if it is reduced, of its backward."""
        ddp = self._ddp
        state = ddp._ddp_state
        state.core.settle_and_refresh()
        join: JoinProtocol = state.sync.join
        join.mean_over_present = not ddp._divide_by_initial_world_size
        reduces = join.receive(_next_forward(ddp), state.parameters.schema)
        if join.differs:
            _train_the_same(ddp, is_present=False)
        added = [param for _, param in state.parameters.unplaced]
        for param in [*state.core.manager.current.params, *added]:
            if param not in self._own:
                # A copy, since a gradient in a bucket's memory is about to be overwritten.
                grad = param.grad
                self._own[param] = None if grad is None else grad.detach().clone()
            param.grad = None
        if join.syncs_buffers:
            ddp._sync_buffers()
        if join.adopts:
            ddp._adopt_parameters()
        ddp.require_forward_param_sync = reduces  # as on the ranks whose forward this is
        if reduces:
            state.core.averager.shadow_backward(GradSource.JOINED)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of the rank that left last; the highest one if there are several."""
        ddp = self._ddp
        state = ddp._ddp_state
        state.core.settle_and_refresh()
        for param, grad in self._own.items():
            param.grad = grad
            state.requests.gradients_are_own()
        where = f"{state.core.where()}, end of join()"
        state.sync.join.agree_on_last(where, is_last_joiner)
        ddp._authoritative_rank = state.sync.source_rank
        buffers = state.parameters.buffers() if ddp.forward_sync_buffers else []
        held = [*state.parameters.params, *buffers]
        _verify_held(ddp, held, where)
        state.state_broadcast.send(
            [tensor.detach() for _, tensor in held],
            f"step {state.counters.reductions}, end of join()",
            "parameters and buffers",
        )
        _leave(ddp)


def announce_forward(ddp: Wrapper) -> None:
    """A forward begins: tell the ranks without inputs which collectives it will make."""
    state = ddp._ddp_state
    message = "inside join() each forward asks the other ranks: leave it first"
    capture.refuse(state.core.manager.current, state.core.where(), message)
    state.core.averager.check_pending()  # as those without inputs have
    _make_up(ddp)
    protocol: JoinProtocol = state.sync.join
    # With throw_on_early_termination a rank without inputs makes this raise: keep that error as is.
    with nullcontext() if throws_on_early_termination(ddp) else _counting(ddp):
        notified = Join.notify_join_context(cast(Joinable, ddp))
    protocol.mean_over_present = not ddp._divide_by_initial_world_size
    protocol.announce(
        _next_forward(ddp),
        state.parameters.schema,
        reduces=torch.is_grad_enabled() and state.sync.enabled,
        syncs_buffers=ddp.will_sync_module_buffers(),
        adopts=torch.is_grad_enabled() and not state.parameters.is_agreed,
    )
    if notified is not None:
        with _counting(ddp):
            notified.wait()
    if protocol.differs:
        _train_the_same(ddp, is_present=True)
    if ddp.forward_sync_buffers and state.parameters.buffers():
        ddp.require_forward_param_sync = protocol.syncs_buffers


def refuse_inside(ddp: Wrapper, what: str) -> None:
    """Raise a RuntimeError inside ``join``: ranks without inputs could not follow."""
    state = ddp._ddp_state
    if state.sync.join is not None and not throws_on_early_termination(ddp):
        raise RuntimeError(
            f"{state.core.where()}: {what} inside join(): a rank that has no inputs left would not "
            "take part. Call it after join()"
        )


def _make_up(ddp: Wrapper) -> None:
    """If no backward has followed the last forward, make its reduction, with zeros.

    Ranks without inputs wait for it.
    """
    state = ddp._ddp_state
    if state.sync.join.is_due:
        state.core.averager.shadow_backward(GradSource.SKIPPED)


def _train_the_same(ddp: Wrapper, is_present: bool) -> None:
    """Freeze the same parameters on all ranks: a rank without inputs follows the source rank.

    The loops of the other ranks may freeze and unfreeze parameters.
    """
    state = ddp._ddp_state
    params = state.parameters.params
    _verify_held(ddp, params, _next_forward(ddp))
    trains = [param.requires_grad for _, param in params]
    required = torch.tensor(trains, dtype=torch.uint8, device=state.device)
    source_rank = state.sync.source_rank
    state.group.broadcast(required, source_rank, _next_forward(ddp), "broadcast of what is frozen")
    if not is_present:
        for (_, param), is_trained in zip(params, required.tolist(), strict=True):
            param.requires_grad_(bool(is_trained))
        state.core.settle_and_refresh()


def _verify_held(ddp: Wrapper, named_tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Verify that all ranks hold the same tensors, trainable or not."""
    state = ddp._ddp_state
    held = [(name, tensor.detach()) for name, tensor in named_tensors]
    verify_same(describe(held, [], {}), state.group, state.device, where)


def _leave(ddp: Wrapper) -> None:
    # After a forward without a backward, only the ranks that had inputs expect to reduce the next
    # backward: clear that.
    ddp._ddp_state.core.forwards.reduction_begins()
    leave_join(ddp)


def _counting(ddp: Wrapper) -> AbstractContextManager[None]:
    what = "count of the ranks that have inputs, inside join()"
    return ddp._ddp_state.group.guard(_next_forward(ddp), what)


def _next_forward(ddp: Wrapper) -> str:
    """This rank and its next step, for errors; the same on a rank without inputs."""
    state = ddp._ddp_state
    return f"rank {state.group.rank}, step {state.counters.reductions + 1}, forward"
