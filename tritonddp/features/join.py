"""Uneven inputs: ranks without inputs run the same collectives as ranks with inputs.

Inside torch's ``Join``, for each forward of the ranks that have inputs::

    step of a forward  rank with inputs                rank without inputs
    count              Join.notify_join_context        Join counts the ranks that have inputs
    announcement       JoinProtocol.announce           JoinProtocol.receive
    buffers            broadcast, if any rank asks     the same
    backward           buckets, as always              shadow_backward: zeros, and all flags 0

The header that each rank sends in the reduction says whether the rank had inputs
(``GradSource.JOINED`` if not), so a mean over the ranks with inputs needs no extra collective. When
no rank has inputs left, all ranks receive the model of a rank that finished last.
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
from tritonddp.coordination.verify import describe, verify_same
from tritonddp.reducer import capture

# Flags in a rank's announcement. A rank without inputs sends 0.
_PRESENT = 1
_REDUCES = 2
_SYNCS_BUFFERS = 4
_OVER_PRESENT = 8
_ADOPTS = 16


class Wrapper(Protocol):
    """The interface of a wrapper that this file needs, in addition to ``Joinable``."""

    _ddp_state: Any
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _divide_by_initial_world_size: bool
    _authoritative_rank: int

    def will_sync_module_buffers(self) -> bool: ...
    def _sync_buffers(self) -> None: ...
    def _adopt_parameters(self) -> None: ...


class JoinProtocol:
    """The agreement of the ranks before each forward of one wrapper inside torch's ``Join``.

    The host waits for the answer, even on a GPU, as stock DDP does if there are buffers.

    Args:
        ddp: the wrapper.
        state: state of the wrapper.
    """

    def __init__(self, ddp: Wrapper, state: Any) -> None:
        self._ddp, self._state, self._group = ddp, state, state.group
        self.is_open = False  # forwards run inside Join
        self.is_due = False  # a forward has announced a reduction that has not begun
        # Whether means without weights are over the ranks that have inputs, not over all ranks.
        self.mean_over_present = False
        # All ranks receive the buffers and the bucket order of this rank: as in stock DDP, the
        # highest rank that has inputs.
        self.source_rank = 0
        self.syncs_buffers = False  # some rank wants to synchronize module buffers
        self.adopts = False  # the forward adopts added or removed parameters
        self._differs = False  # ranks train different parameters

    def reduction_begins(self) -> None:
        """Begin the announced reduction: later forwards announce another one."""
        self.is_due = False

    def reduces_backward(self, is_enabled: bool, where: str) -> bool:
        """Return True if the backward that begins now is the one that a forward announced."""
        if not self.is_due and is_enabled:
            raise RuntimeError(
                f"{where}: this backward inside join() follows no forward outside no_sync(). Ranks "
                "without inputs "
                "follow exactly one reduced backward for each forward outside no_sync(). Run the "
                "forward of this backward outside no_sync() too. Run further backwards of the "
                "same forward, and backwards without a forward, inside no_sync()"
            )
        return self.is_due

    def refuse(self, what: str) -> None:
        """Raise a RuntimeError, because ranks without inputs could not follow."""
        if not throws_on_early_termination(self._ddp):
            raise RuntimeError(
                f"{self._state.core.where()}: {what} was called inside join(), where ranks without "
                "inputs cannot take part. Call it after join()"
            )

    # Steps of a forward

    def announce(self) -> None:
        """Announce to all ranks which collectives this forward will run.

        Raises:
            RuntimeError: a rank is missing, or the ranks are about to run different collectives.
        """
        ddp, state = self._ddp, self._state
        message = "each forward inside join() communicates with the other ranks: leave join() first"
        capture.refuse(state.core.manager.current, state.core.where(), message)
        self._group.recover()
        state.core.reducer.check_pending()  # as ranks without inputs have done
        self._make_up()
        # With throw_on_early_termination, a rank without inputs makes this raise: keep that error.
        with nullcontext() if throws_on_early_termination(ddp) else self.counting():
            notified = Join.notify_join_context(cast(Joinable, ddp))
        self.mean_over_present = not ddp._divide_by_initial_world_size
        has_grad = torch.is_grad_enabled()
        flags = _PRESENT + _REDUCES * (has_grad and state.sync.enabled)
        flags += _SYNCS_BUFFERS * ddp.will_sync_module_buffers()
        flags += _OVER_PRESENT * self.mean_over_present
        flags += _ADOPTS * (has_grad and not state.parameters.is_agreed)
        self.is_open = True
        self.is_due = self._agree(flags)
        if notified is not None:
            with self.counting():
                notified.wait()
        if self._differs:
            self._train_the_same(is_present=True)
        if ddp.forward_sync_buffers and state.parameters.buffers():
            ddp.require_forward_param_sync = self.syncs_buffers

    def receive(self) -> bool:
        """Announce that this rank has no inputs. Return True if the others reduce a backward."""
        self.mean_over_present = not self._ddp._divide_by_initial_world_size
        reduces = self._agree(0)
        if self._differs:
            self._train_the_same(is_present=False)
        return reduces

    def end_forward(self) -> None:
        """Complete the last forward of this rank, and its backward if there was one."""
        self._state.core.flush_and_refresh()
        self._make_up()

    def _make_up(self) -> None:
        """If no backward followed the last forward, run its reduction with zeros.

        Ranks without inputs wait for it.
        """
        if self.is_due:
            self._state.core.reducer.shadow_backward(GradSource.SKIPPED)

    def counting(self) -> AbstractContextManager[None]:
        """Return a context whose errors name the rank missing from the count of ranks."""
        what = "counting the ranks with inputs inside join()"
        guard: AbstractContextManager[None] = self._group.guard(self._next_forward(), what)
        return guard

    def _next_forward(self) -> str:
        """Describe this rank and its next step, for errors; also on a rank without inputs."""
        return f"rank {self._group.rank}, step {self._state.counters.reductions + 1}, forward"

    def _agree(self, mine: int) -> bool:
        state = self._state
        schema = int.from_bytes(state.parameters.schema, "little")
        what = "announcement of a forward inside join()"
        flags, schemas = self._gather(mine, schema, self._next_forward(), what)
        present = [number for number, each in enumerate(flags) if each]
        if len({flags[number] & _OVER_PRESENT for number in present}) > 1:
            raise RuntimeError(
                f"{self._next_forward()}: divide_by_initial_world_size of join() differs between "
                "ranks. Pass the same value on all ranks"
            )
        self.syncs_buffers = any(each & _SYNCS_BUFFERS for each in flags)
        self._differs = len(set(schemas)) > 1
        self.adopts = any(each & _ADOPTS for each in flags)
        reduces = {flags[number] & _REDUCES for number in present}
        if len(reduces) > 1:
            raise RuntimeError(
                f"{self._next_forward()}: inside join(), ranks must agree on which forwards have "
                f"a reduced backward. This forward: {_in_words(flags)}. Run the same forwards "
                "inside no_sync() or torch.no_grad() on every rank"
            )
        return reduces == {_REDUCES}

    def _gather(self, mine: int, schema: int, where: str, what: str) -> Any:
        """Return flags and schemas of all ranks. The highest rank with flags becomes the source."""
        rows = [(0, 0)] * self._group.size
        rows[self._group.rank] = mine, schema
        message = torch.tensor(rows, dtype=torch.int32, device=self._state.device)
        self._group.all_reduce(message, where, what)
        flags, schemas = message.T.tolist()
        self.source_rank = max((rank for rank, each in enumerate(flags) if each), default=0)
        return flags, schemas

    def _train_the_same(self, is_present: bool) -> None:
        """Freeze the same parameters on all ranks: ranks without inputs follow the source rank.

        The training loops of the other ranks may freeze and unfreeze parameters.
        """
        params, where = self._state.parameters.params, self._next_forward()
        self._verify_held(params, where)
        trains = [param.requires_grad for _, param in params]
        required = torch.tensor(trains, dtype=torch.uint8, device=self._state.device)
        self._group.broadcast(required, self.source_rank, where, "broadcast of requires_grad flags")
        if not is_present:
            for (_, param), is_trained in zip(params, required.tolist(), strict=True):
                param.requires_grad_(bool(is_trained))
            self._state.core.flush_and_refresh()

    def _verify_held(self, named_tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
        """Verify that all ranks hold the same tensors, trainable or not."""
        held = [(name, tensor.detach()) for name, tensor in named_tensors]
        verify_same(describe(held, [], {}), self._group, self._state.device, where)

    # The end

    def take_over(self, is_last: bool) -> None:
        """Receive the model of the last rank to run out of inputs; of several, the highest."""
        ddp, state = self._ddp, self._state
        where = f"{state.core.where()}, end of join()"
        what = "agreement on the source rank of the final model inside join()"
        self._gather(_PRESENT * is_last, 0, where, what)
        ddp._authoritative_rank = self.source_rank
        buffers = state.parameters.buffers() if ddp.forward_sync_buffers else []
        held = [*state.parameters.params, *buffers]
        self._verify_held(held, where)
        state.state_broadcast.send(
            [tensor.detach() for _, tensor in held],
            f"step {state.counters.reductions}, end of join()",
            "parameters and buffers",
        )
        self.leave()

    def leave(self) -> None:
        """Leave ``join`` with this wrapper."""
        # After a forward without a backward, only the ranks that had inputs expect to reduce the
        # next backward: clear that expectation.
        self._state.core.forwards.reduction_begins()
        leave_join(self._ddp)


def _in_words(flags: list[int]) -> str:
    return "; ".join(
        f"rank {rank}: "
        + ("has no inputs left" if not each else "yes" if each & _REDUCES else "no")
        for rank, each in enumerate(flags)
    )


class UnevenInputs(CountingJoin):
    """torch's ``Join`` for one wrapped module. On exit, it first ends the running reduction."""

    @property
    def _protocol(self) -> JoinProtocol | None:
        """``None`` if the context does nothing."""
        wrapper: Any = self._joinables[0]
        protocol: JoinProtocol | None = wrapper._ddp_state.sync.join
        return protocol

    def counting(self) -> AbstractContextManager[None]:
        """See :meth:`JoinProtocol.counting`."""
        protocol = self._protocol
        return nullcontext() if protocol is None else protocol.counting()

    def __exit__(self, *error: Any) -> None:
        protocol = self._protocol
        try:
            if error[0] is None and protocol is not None:
                protocol.end_forward()
            super().__exit__(*error)
        finally:
            if protocol is not None:
                protocol.leave()


class ShadowHook(JoinHook):
    """Runs in torch's ``Join`` on a rank that has no inputs left.

    Between two iterations, ``.grad`` holds the reduced gradients of the other ranks, or ``None``
    if no rank has a gradient. An optimizer that joins too (torch's ``ZeroRedundancyOptimizer``)
    steps with them. At the end, the local gradients are restored. Otherwise, the next loop would
    add local gradients to gradients of other ranks.
    """

    def __init__(self, ddp: Wrapper, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._ddp = ddp
        self._own: dict[Parameter, Tensor | None] = {}
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Run the collectives of one forward and, if it is reduced, of its backward."""
        ddp, state = self._ddp, self._ddp._ddp_state
        state.core.flush_and_refresh()
        join: JoinProtocol = state.sync.join
        reduces = join.receive()
        added = [param for _, param in state.parameters.unplaced]
        for param in [*state.core.manager.current.params, *added]:
            if param not in self._own:
                # A copy, because gradients in bucket memory are about to be overwritten.
                grad = param.grad
                self._own[param] = None if grad is None else grad.detach().clone()
            param.grad = None
        if join.syncs_buffers:
            ddp._sync_buffers()
        if join.adopts:
            ddp._adopt_parameters()
        ddp.require_forward_param_sync = reduces  # as on the ranks that run this forward
        if reduces:
            state.core.reducer.shadow_backward(GradSource.JOINED)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Receive the model of the rank that finished last; of several, the highest rank."""
        state = self._ddp._ddp_state
        state.core.flush_and_refresh()
        for param, grad in self._own.items():
            param.grad = grad
            state.core.reducer.gradients_are_own()
        state.sync.join.take_over(is_last_joiner)
