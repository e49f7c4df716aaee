"""What the next run needs to know of a reducer, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tritonddp.buckets.residuals import check_state, load_state, state_of
from tritonddp.coordination.collectives import all_reduce
from tritonddp.reducer.between import BetweenBackwards
from tritonddp.reducer.state import Phase


class Resumes(BetweenBackwards):
    """What ``comm_state_dict()`` and ``load_comm_state_dict()`` ask of a reducer."""

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
            all_reduce(message, self._group).wait()
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
