"""What a reducer does while no backward runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import register_post_accumulate_grad_hook, steps_optimizers
from tritonddp.comm.comm_hook import Hook, HookReduction
from tritonddp.coordination.forks import refuse_inherited, when_forked
from tritonddp.features.optimizer_in_backward import SteppingReduction, take_over
from tritonddp.features.unused_params import unused_error
from tritonddp.reducer.participation import as_trainable
from tritonddp.reducer.recovery import InStep
from tritonddp.reducer.state import Phase, reducers


class BetweenBackwards(InStep):
    """What a :class:`~tritonddp.reducer.reducer.Reducer` does from one backward to the next."""

    # Before a forward

    def prepare_for_forward(self) -> None:
        """See that the last backward came to its end, and what has become of the parameters.

        Raises:
            NotImplementedError: a parameter was added that cannot be reduced.
            RuntimeError: in strict mode, with gradients, the last backward left parameters unused;
                or the ranks did not reduce the same (on a GPU, where the backward itself does not
                wait for the answer); or this process was forked from a rank.
        """
        if self._phase is Phase.DETACHED:
            refuse_inherited(self._group)
            return
        if torch.is_grad_enabled():
            self._check_finalized()
        self._recover_all()
        self._settle()
        self._wait_post_backward()
        if torch.is_grad_enabled():
            self.forwards += 1
            self._forwards.begins()
            self._look()
            if self._unused_error is not None:
                message, self._unused_error = self._unused_error, None
                raise RuntimeError(message)

    def prepare_to_follow(self) -> None:
        """No forward follows: see that the last backward came to its end, as if one did.

        Raises:
            RuntimeError: it waits for ``finalize_backward()``; or see :meth:`prepare_for_forward`.
        """
        self._check_finalized()
        self._wait_post_backward()
        self._recover_all()
        self._settle()
        self._look()

    def _look(self) -> None:
        """See what has become of the parameters."""
        if self._roster.look(self._where):
            self._forget_added()
            # A backward may reach nothing else that has a hook of ours.
            added = [param for _, param in self._roster.added]
            with as_trainable(added):
                self._hooks_of_added = [
                    register_post_accumulate_grad_hook(param, _gradient_hook(weakref.ref(self)))
                    for param in added
                ]
        if take_over(param for _, param in self._roster.params) and not self._steps:
            self._steps = True
            if not self._steps_in_hook:
                self._reduction = SteppingReduction(self._reduction, self._where)

    def watch(self, outputs: Sequence[Tensor], syncs: bool = True) -> None:
        """A forward has returned ``outputs``.

        Args:
            outputs: its tensors.
            syncs: whether backwards through them may be reduced: it ran outside ``no_sync``.
        """
        self._outputs.watch(outputs, self._forwards.ended(self.counters.reductions, syncs))

    def forget_forwards(self) -> None:
        """No forward until now waits for its backward any more."""
        self._forwards.backward_begins(reduced=True)

    def missing(self) -> list[Parameter]:
        """Parameters that the last reduced backward has not reached."""
        return [self.placement.params[number] for number in self._constancy.missing or ()]

    def _note_unused(self) -> None:
        """In strict mode: what the next forward raises, if this backward left parameters unused."""
        trainable = {param for _, param in self._roster.trainable}
        unused = [
            name
            for name, param, used in zip(
                self.placement.names, self.placement.params, self._used, strict=True
            )
            if param in trainable and (not used or param.grad is None)
        ]
        self._raise_of_unused(unused)

    def _raise_of_unused(self, unused: Sequence[str]) -> None:
        """The next forward raises an error if there are any of these names."""
        if unused:
            index_of = {name: index for index, (name, _) in enumerate(self._roster.trainable)}
            self._unused_error = unused_error(
                self._where(), self._group.rank(), {name: index_of[name] for name in unused}
            )

    # When a backward ends in finalize_backward()

    @property
    def launches_at_end(self) -> bool:
        """Whether the buckets of the next reduced backward are launched at its end only."""
        return self.arrangement.is_provisional

    def finalize_on_request(self, required: bool) -> None:
        """Whether backwards end in :meth:`finalize_backward`, not by themselves.

        Raises:
            RuntimeError: a backward runs, or is not finalised.
        """
        # (One that broke off is over: the next forward makes up for it.)
        if self._phase is Phase.UNFINISHED or (
            self._phase is not Phase.DETACHED and self._end_is_queued() is not None
        ):
            raise RuntimeError(
                f"{self._where()}: set_manual_finalization_required cannot be called after forward "
                "while a backward pass is expected or in progress. Set "
                "require_manual_backward_finalization before forward or after backward finalization"
            )
        self._finalizes_on_request = required

    def _check_finalized(self) -> None:
        if self._phase is Phase.UNFINISHED:
            raise RuntimeError(
                f"{self._where()}: Expected to have finalized the prior backward pass before "
                "starting a new one. Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is true."
            )

    def _check_reducer_finalized(self) -> None:
        """Raise what the next forward would raise, or make up for.

        Raises:
            RuntimeError: the last backward has not come to its end, or has left parameters unused
                in strict mode.
        """
        if self._phase not in (Phase.IDLE, Phase.DETACHED):
            runs = self._end_is_queued() is not None
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                f"one. {self._where()}: a backward {'still runs' if runs else 'broke off'}. The "
                "next forward takes care of what it has left."
            )
        if self._unused_error is not None:
            raise RuntimeError(self._unused_error)

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future]) -> None:
        """Wait for these at the end of the next backward, or before the next forward.

        They come from hooks for buffers.
        """
        self._post_backward.extend(futures)

    def _wait_post_backward(self) -> None:
        if self._post_backward:
            futures, self._post_backward = self._post_backward, []
            torch.futures.wait_all(futures)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have ``hook`` reduce the buckets of all backwards from now on.

        Args:
            state: handed to the hook.
            hook: see :class:`~tritonddp.comm.comm_hook.HookReduction`.

        Raises:
            RuntimeError: there is one already, gradients are quantised, a backward or a trace is
                under way, or a backward waits for ``finalize_backward()``.
        """
        if self._wire.compression is not None:
            raise RuntimeError(
                f"compression={self._wire.compression!r} and a communication hook both decide "
                "how gradients travel: leave one of them out"
            )
        if self._run_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if self.is_traced or self._end_is_queued() is not None:
            raise RuntimeError(
                f"{self._where()}: a communication hook cannot be registered during a backward, "
                "or inside trace()"
            )
        self._check_finalized()
        self._recover_all()
        self._settle()
        arrangement = self.arrangement
        reduction = HookReduction(
            hook,
            state,
            self._group,
            self.counters,
            self._roll_call,
            lambda: arrangement.placement.buckets,
        )
        self._run_hook = lambda bucket: hook(state, bucket)
        self._steps_in_hook = steps_optimizers(hook)
        steps = self._steps and not self._steps_in_hook
        self._reduction = SteppingReduction(reduction, self._where) if steps else reduction

    def _remove_autograd_hooks(self) -> None:
        """Let go of the parameters for good, without waiting for any other rank."""
        self._phase = Phase.DETACHED
        self._readiness.remove()
        self._forget_added()
        self._in_flight.clear()
        reducers[self._group].discard(self)


@when_forked
def _detach_all() -> list[dist.ProcessGroup]:
    """This process is no rank: no backward here is reduced."""
    groups = list(reducers)
    for reducer in chain.from_iterable([*reducers[group]] for group in groups):
        assert isinstance(reducer, BetweenBackwards)
        reducer._remove_autograd_hooks()
    return groups


def _gradient_hook(reducer: weakref.ref[BetweenBackwards]) -> Callable[[Tensor], None]:
    """Hook on a parameter that is in no bucket yet."""

    def gradient_came(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.begin()

    return gradient_came
