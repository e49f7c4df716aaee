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

from tritonddp._compat import register_post_accumulate_grad_hook, steps_optimizers
from tritonddp.comm.feedback import check_state, load_state, state_of
from tritonddp.comm.hooks import Hook, HookReduction
from tritonddp.comm.optimizers import SteppingReduction, take_over
from tritonddp.forks import refuse_inherited, when_forked
from tritonddp.in_step import InStep
from tritonddp.participation import as_trainable
from tritonddp.reducer_state import Phase, reducers


class BetweenBackwards(InStep):
    """What a :class:`~tritonddp.reducer.Reducer` does from one backward to the next."""

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

    # What the next run needs to know

    def comm_state(self) -> dict[str, Any]:
        """The order of the buckets, and what else the bits of the next reduction depend on."""
        self.prepare_to_follow()
        unit = self._reduction.get_unit()
        return {
            "bucket_order": self.arrangement.order,
            "reductions_since_change": self.arrangement.since_change,
            "weight_unit": unit,
            "wires": [] if self.auto is None else self.auto.state,
            **state_of(self.buckets, unit),
        }

    @torch.no_grad()
    def load_comm_state(
        self, states: Sequence[dict[str, Any]], failure: Exception | None = None
    ) -> None:
        """Go on as the run that had the first of these states on rank 0.

        What was left out of gradients is that of all states of all ranks together.

        Args:
            states: what the user has given on this rank.
            failure: why they cannot be read.

        Raises:
            Exception: ``failure``, when the other ranks know of it.
            RuntimeError: a backward is under way, or another rank cannot load its states.
            ValueError: what was left out is not that of these parameters.
        """
        self.prepare_to_follow()
        if self._phase is Phase.DETACHED:
            return
        if self._phase is not Phase.IDLE:
            raise RuntimeError(
                f"{self._where()}: load_comm_state_dict() was called while a backward runs: call "
                "it between two steps"
            )
        self._roster.enroll()
        params = self._roster.params
        said: tuple[Sequence[float], Sequence[float]] = [-1.0], []
        if failure is None:
            try:
                check_state(params, states)
                said = self._numbers_of(states[0]) if states else said
            except ValueError as error:
                failure = error
        since_change, order, unit, wires = self._agree_on_state(*said, failure)
        if since_change < 0:
            return  # saved before the first step
        self._reduction.set_unit(unit)
        if self.auto is not None:
            self.auto.load(wires)
        self._renumber(self.arrangement.restore(order, since_change))
        load_state(self.buckets, states, unit)

    def _numbers_of(self, state: dict[str, Any]) -> tuple[list[float], list[float]]:
        """What rank 0 tells the others of this state: the order of buckets, and the rest.

        Numbers, since all ranks have the same parameters: nothing is unpickled that another rank
        has sent.

        Raises:
            ValueError: the state is of another run.
        """
        if not state["bucket_order"]:
            return [-1.0], []
        number_of = {name: number for number, (name, _) in enumerate(self._roster.params)}
        order = [number_of[name] for name in state["bucket_order"] if name in number_of]
        wires = [] if self.auto is None else state["wires"]
        if self.auto is not None and (len(wires) > len(number_of) or not self.auto.knows(wires)):
            raise ValueError(
                f"the state has {wires!r} as 'wires', which a run with these parameters cannot "
                "have had: load the state of a run with the same model"
            )
        return [state["reductions_since_change"], *order], [state["weight_unit"], *wires]

    def _agree_on_state(
        self, order: Sequence[float], rest: Sequence[float], failure: Exception | None
    ) -> tuple[int, list[int], float, list[int]]:
        """What rank 0 says of its state, if no rank has failed to read its own.

        Raises:
            RuntimeError: another rank has.
        """
        # Rank 0's numbers, less than none for what is missing, and which ranks have failed. Small
        # integers and powers of two are exact in fp64.
        rank, params = self._group.rank(), self._roster.params
        message = torch.zeros(3, max(1 + len(params), self._group.size()), dtype=torch.float64)
        if rank == 0:
            message[:2] = -1
            for row, numbers in zip(message, (order, rest), strict=False):
                row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        message[2, rank] = failure is not None
        message = message.to(params[0][1].device)
        with self._roll_call.naming(self._where(), "all-reduce of the state of communication"):
            dist.all_reduce(message, group=self._group)
        self.counters.collective(message.nbytes, self._group.size(), passes=2)
        (since_change, *numbers), (unit, *wires), failed = message.tolist()
        if failure is not None:
            raise failure
        if any(failed):
            ranks = [str(rank) for rank, has_failed in enumerate(failed) if has_failed]
            raise RuntimeError(
                f"{self._where()}: load_comm_state_dict() failed on rank {', '.join(ranks)}, and "
                "nothing was loaded on any rank: see the error there"
            )
        return (
            int(since_change),
            [int(number) for number in numbers if number >= 0],
            unit,
            [int(number) for number in wires if number >= 0],
        )

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

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """A forward has returned ``outputs``."""
        self._outputs.watch(outputs, self.counters.reductions)

    def missing(self) -> list[Parameter]:
        """Parameters that the last reduced backward has not reached."""
        return [self.placement.params[number] for number in self._constancy.missing or ()]

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
            hook: see :class:`~tritonddp.comm.hooks.HookReduction`.

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
