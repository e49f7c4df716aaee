"""Uneven inputs: a rank that has run out of them makes the collectives of those that go on.

Inside torch's ``Join``, for each forward of the ranks that have inputs::

    forward           has inputs                      has none left
    notify            Join.notify_join_context        Join counts those that have inputs
    what will come    Attendance.tell                 Attendance.listen
    buffers           broadcast, if any rank says so  the same
    backward          buckets, as always              Reducer.follow: zeros, and all flags 0

The ballots say which ranks had none (``Source.JOINED``), so a mean over those that had needs no
collective of its own. When none has inputs any more, all get the model of one that left last.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import Parameter

from tritonddp._torch import CountingJoin, joins, leave_join, throws_on_early_termination
from tritonddp.config import check_flags
from tritonddp.coordination.agreement import Source
from tritonddp.coordination.collectives import broadcast
from tritonddp.coordination.failures import RollCall
from tritonddp.coordination.forks import refuse_inherited
from tritonddp.coordination.verify import describe, verify_same

if TYPE_CHECKING:
    from tritonddp.ddp import DistributedDataParallel


class Follower(Joinable):
    """The part of the wrapper that torch's ``Join`` sees."""

    device: torch.device
    process_group: dist.ProcessGroup

    def __init__(self) -> None:
        super().__init__()
        # Stock's names.
        self._divide_by_initial_world_size = True
        self._authoritative_rank = 0

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context: ranks may run out of inputs at different times.

        A rank that leaves the body waits there for the others, and makes the collectives of their
        forwards and backwards, with gradients of zero. When all have left it, every rank gets the
        parameters and buffers of one that left last.

        Inside, as in stock, the *forward* decides what is reduced, since it tells the ranks that
        wait: one reduced backward follows each forward that runs with gradients and outside
        :meth:`no_sync`; all other backwards belong under :meth:`no_sync`. (A forward that no
        backward follows is made up for by the next, or at the end.) All ranks that have inputs
        make the same forwards, of one wrapped module after the other. What a rank has accumulated
        when its inputs end is not reduced.

        Args:
            divide_by_initial_world_size: divide the sum of the gradients by the number of ranks;
                ``False`` divides it by the number of those that still have inputs. Weighted means
                (:meth:`weighted`) count those only either way; communication hooks divide
                themselves, as in stock.
            enable: ``False`` makes this context do nothing.
            throw_on_early_termination: when a rank runs out of inputs, raise an error on all.

        Raises:
            RuntimeError: on every rank, if one runs out of inputs and
                ``throw_on_early_termination`` is set; in a forward, if ranks do not agree on
                whether its backward is reduced; in a backward, if its forward did not tell that it
                is reduced; or the ranks hold different parameters.
            TypeError: an argument is not on or off.

        Example::

            with model.join():
                for batch in batches:  # more of them on some ranks
                    loss(model(batch)).backward()
                    optimizer.step()

        With further classes that can be joined, a ``ZeroRedundancyOptimizer`` say, use
        ``torch.distributed.algorithms.join.Join([model, optimizer])``, in the order in which they
        are called, and end the body with a backward. While a rank waits, its ``.grad`` are those of
        the others, so that its share of the optimizer does the right step; afterwards they are its
        own again.
        """
        check_flags({"enable": enable, "throw_on_early_termination": throw_on_early_termination})
        return UnevenInputs(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> FollowingHook:
        """What torch's ``Join`` runs on a rank that has no inputs left.

        Args:
            kwargs: ``divide_by_initial_world_size``, see :meth:`join`.

        Raises:
            TypeError: it is not on or off.
        """
        ddp = cast("DistributedDataParallel", self)
        divides = kwargs.get("divide_by_initial_world_size", True)
        check_flags({"divide_by_initial_world_size": divides})
        refuse_inherited(ddp.process_group)
        ddp.logger._set_uneven_input_join()
        return FollowingHook(ddp, divides)

    @property
    def join_device(self) -> torch.device:
        """Where torch's ``Join`` counts the ranks that have inputs."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """In which torch's ``Join`` counts them."""
        return self.process_group


class UnevenInputs(CountingJoin):
    """torch's ``Join`` of one wrapped module, which first brings what is under way to its end."""

    def counting(self) -> AbstractContextManager[None]:
        """Names who is missing when this rank waits for those that have inputs."""
        return _counting(cast("DistributedDataParallel", self._joinables[0]))

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ddp = cast("DistributedDataParallel", self._joinables[0])
        try:
            if type is None and is_joining(ddp):
                ddp.reducer.prepare_to_follow()
                _make_up(ddp)
            super().__exit__(type, value, traceback)
        finally:
            _leave(ddp)


class FollowingHook(JoinHook):
    """What torch's ``Join`` runs on a rank that has no inputs left.

    Between two iterations ``.grad`` holds what the other ranks have reduced, ``None`` where none
    has a gradient: an optimizer that joins too (``ZeroRedundancyOptimizer``) steps with it. What
    this rank had comes back in the end, or the next loop would add its gradients to another's.

    Args:
        ddp: the wrapped module.
        divide_by_initial_world_size: see :meth:`Follower.join`.
    """

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._ddp = ddp
        self._own: dict[Parameter, Tensor | None] = {}
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Make the collectives of one forward and, if it is reduced, of its backward."""
        ddp = self._ddp
        ddp.reducer.prepare_to_follow()
        ddp._attendance.mean_over_present = not ddp._divide_by_initial_world_size
        reduces = ddp._attendance.listen(_coming(ddp), ddp.reducer.structure)
        if ddp._attendance.differs:
            _train_the_same(ddp, is_present=False)
        self._set_gradients_aside()
        if ddp._attendance.syncs_buffers:
            ddp._sync_buffers()
        ddp.require_forward_param_sync = reduces  # as on the ranks whose forward this is
        if reduces:
            ddp.reducer.follow(Source.JOINED)

    def _set_gradients_aside(self) -> None:
        for param in self._ddp.reducer.params:
            if param not in self._own:
                # A copy: what lies in a bucket is about to be overwritten.
                grad = param.grad
                self._own[param] = None if grad is None else grad.detach().clone()
            param.grad = None

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model over from the rank that left last, of several from the highest.

        Raises:
            RuntimeError: on every rank, if they hold different parameters.
        """
        ddp = self._ddp
        ddp.reducer.prepare_to_follow()
        for param, grad in self._own.items():
            param.grad = grad
            ddp.reducer.own_gradients_at = ddp.reducer.counters.reductions
        ddp._attendance.agree_on_last(f"{_where(ddp)}, end of join()", is_last_joiner)
        ddp._authoritative_rank = ddp._attendance.source_rank
        params, buffers = ddp.reducer.held()
        if not ddp.forward_sync_buffers:
            buffers = []
        _verify_held(ddp, [*params, *buffers], f"{_where(ddp)}, end of join()")
        ddp._broadcast(
            [tensor.detach() for _, tensor in [*params, *buffers]],
            f"step {ddp.reducer.counters.reductions}, end of join()",
            "parameters and buffers",
        )
        _leave(ddp)


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether forwards run inside torch's ``Join``, which has not been switched off."""
    return joins(ddp)


def announce_forward(ddp: DistributedDataParallel) -> None:
    """A forward begins: tell the ranks that have no inputs which collectives it will bring.

    Raises:
        RuntimeError: another rank has none left, where that is to end the loop; or the ranks do not
            agree on what will be reduced.
    """
    _make_up(ddp)
    attendance = ddp._attendance
    # Where a rank without inputs ends the loop, that is an error of its own.
    with nullcontext() if throws_on_early_termination(ddp) else _counting(ddp):
        notified = Join.notify_join_context(ddp)
    attendance.mean_over_present = not ddp._divide_by_initial_world_size
    attendance.tell(
        _coming(ddp),
        ddp.reducer.structure,
        reduces=torch.is_grad_enabled() and ddp.require_backward_grad_sync,
        syncs_buffers=ddp.will_sync_module_buffers(),
    )
    if notified is not None:
        with _counting(ddp):
            notified.wait()
    if attendance.differs:
        _train_the_same(ddp, is_present=True)
    if ddp.forward_sync_buffers and ddp.reducer.held()[1]:
        ddp.require_forward_param_sync = attendance.syncs_buffers


def reduces_backward(ddp: DistributedDataParallel) -> bool:
    """Whether a backward that begins now is the one that a forward has announced.

    Raises:
        RuntimeError: it is not, and it is outside ``no_sync`` nevertheless.
    """
    if not ddp._attendance.is_due and ddp.require_backward_grad_sync:
        raise RuntimeError(
            f"{_where(ddp)}: a backward inside join() that no forward has announced. Ranks without "
            "inputs follow one reduced backward after each forward that runs outside no_sync(): "
            "run the forward of this backward outside no_sync() too; put all but the first "
            "backward of a forward, and those without a forward, under no_sync()"
        )
    return ddp._attendance.is_due


def refuse_inside(ddp: DistributedDataParallel, what: str) -> None:
    """Collectives that ranks without inputs could not follow.

    Raises:
        RuntimeError: inside ``join``.
    """
    if is_joining(ddp) and not throws_on_early_termination(ddp):
        raise RuntimeError(
            f"{_where(ddp)}: {what} inside join(): a rank that has no inputs left would not take "
            "part. Call it after join()"
        )


def _make_up(ddp: DistributedDataParallel) -> None:
    """If no backward has followed the last forward: the ranks without inputs wait for it."""
    if ddp._attendance.is_due:
        ddp.reducer.follow(Source.SKIPPED)


def _train_the_same(ddp: DistributedDataParallel, is_present: bool) -> None:
    """Loops freeze and unfreeze parameters; a rank that has left its loop follows the others.

    Raises:
        RuntimeError: on every rank, if they do not hold the same parameters.
    """
    params = ddp.reducer.held()[0]
    _verify_held(ddp, params, _coming(ddp))
    required = torch.tensor(
        [param.requires_grad for _, param in params], dtype=torch.uint8, device=ddp.device
    )
    source_rank = ddp._attendance.source_rank
    with RollCall(ddp.process_group).naming(_coming(ddp), "broadcast of what is frozen"):
        broadcast(required, ddp.process_group, source_rank).wait()
    if not is_present:
        for (_, param), trains in zip(params, required.tolist(), strict=True):
            param.requires_grad_(bool(trains))
        ddp.reducer.prepare_to_follow()


def _verify_held(
    ddp: DistributedDataParallel, named_tensors: Iterable[tuple[str, Tensor]], where: str
) -> None:
    """Do all ranks hold the same tensors, trainable or not?"""
    held = [(name, tensor.detach()) for name, tensor in named_tensors]
    verify_same(describe(held, [], {}), ddp.process_group, ddp.device, where)


def _leave(ddp: DistributedDataParallel) -> None:
    # A forward without a backward has armed the reduction on the ranks that had inputs only.
    ddp.reducer.forget_forwards()
    ddp._attendance.leave()
    leave_join(ddp)


def _counting(ddp: DistributedDataParallel) -> AbstractContextManager[None]:
    what = "count of the ranks that have inputs, inside join()"
    return RollCall(ddp.process_group).naming(_coming(ddp), what)


def _coming(ddp: DistributedDataParallel) -> str:
    """Before the collectives of a forward, on the ranks that follow too."""
    return f"rank {ddp.process_group.rank()}, step {ddp.reducer.counters.reductions + 1}, forward"


def _where(ddp: DistributedDataParallel) -> str:
    return f"rank {ddp.process_group.rank()}, step {ddp.reducer.counters.reductions}"
