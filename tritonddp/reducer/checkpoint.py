"""Save and load the communication state, so that a later run gets identical bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonddp.buckets.residuals import check_state, load_state, state_of

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer


def comm_state(reducer: Reducer) -> dict[str, Any]:
    """Return all state that determines the bits of the next reduction, such as bucket order."""
    manager, unit = reducer.manager, reducer.weights.unit
    return {
        "rank": reducer.group.rank,
        "world_size": reducer.group.size,
        "bucket_order": manager.order,
        "keeps_order": manager.keeps_order,
        "weight_unit": unit,
        **state_of(manager.current.buckets, unit),
    }


@torch.no_grad()
def load_comm_state(reducer: Reducer, states: Sequence[dict[str, Any]]) -> None:
    """Continue from the first state that the user passed on rank 0.

    Residuals (quantization errors that error feedback adds to the next gradients) are summed over
    all states of all ranks.
    """
    reducer.parameters.register()
    numbers: list[float] = []
    failure: Exception | None = None
    try:
        for state in states:
            _check(state)
        check_state(reducer.parameters.params, states)
        if states:
            numbers = _numbers_of(reducer, states[0])
    except (TypeError, ValueError) as error:
        failure = error
    try:
        keeps_order, unit, order = _agree(reducer, numbers, failure is not None)
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback refers to this frame, which would keep the wrapper alive
    if not order:
        return  # saved before the first step
    reducer.weights.set_unit(unit)
    manager = reducer.manager
    manager.restore(order, keeps_order)
    load_state(manager.current.buckets, states, unit)


def _numbers_of(reducer: Reducer, state: dict[str, Any]) -> list[float]:
    """Return this state as numbers, which rank 0 sends to the other ranks; order last.

    Numbers suffice, since all ranks have the same parameters. So no rank unpickles data from
    another rank.
    """
    if not state["bucket_order"]:
        return []
    number_of = {name: number for number, (name, _) in enumerate(reducer.parameters.params)}
    order = [number_of[name] for name in state["bucket_order"] if name in number_of]
    keeps_order = state.get("keeps_order", False)
    return [keeps_order, state["weight_unit"], *order]


def _agree(
    reducer: Reducer, numbers: Sequence[float], has_failed: bool
) -> tuple[bool, float, list[int]]:
    """Return the numbers of rank 0's state; raise if another rank failed to read its state."""
    # First row: the numbers of rank 0, padded with -1. Second row: flags of the ranks that failed.
    # Small integers and powers of two are exact in fp64.
    group, params = reducer.group, reducer.parameters.params
    message = torch.zeros(2, max(2 + len(params), group.size), dtype=torch.float64, device="cpu")
    if group.rank == 0:
        message[0] = -1
        message[0, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    message[1, group.rank] = has_failed
    message = message.to(params[0][1].device)
    group.all_reduce(message, reducer.where(), "all-reduce of the state of communication")
    reducer.counters.collective(message.nbytes, group.size, passes=2)
    (keeps_order, unit, *order), failed = message.tolist()
    if any(failed) and not has_failed:
        ranks = [str(rank) for rank, one in enumerate(failed) if one]
        raise RuntimeError(
            f"{reducer.where()}: load_comm_state_dict() failed on rank {', '.join(ranks)}. Nothing "
            "was loaded on any rank. See the error of that rank"
        )
    places = [int(number) for number in order if number >= 0]
    return keeps_order > 0, unit, places


def _check(state: Any) -> None:
    """Raise a TypeError or a ValueError if ``comm_state_dict()`` cannot have returned ``state``."""
    what = "load_comm_state_dict() expects a state from comm_state_dict()"
    if not isinstance(state, Mapping):
        raise TypeError(f"{what}, got {state!r}")
    order = state.get("bucket_order")
    if not isinstance(order, list) or not all(isinstance(each, str) for each in order):
        raise TypeError(f"{what}, but 'bucket_order' is not a list of str: {order!r}")
    if len(set(order)) < len(order):
        raise ValueError(f"{what}, but 'bucket_order' names a parameter twice: {order!r}")
    if not isinstance(state.get("keeps_order", False), bool):  # older states lack it
        raise TypeError(f"{what}, but 'keeps_order' is neither True nor False")
    unit = state.get("weight_unit")
    if isinstance(unit, bool) or not isinstance(unit, int | float):
        raise TypeError(f"{what}, but 'weight_unit' is not a number: {unit!r}")
    if not math.ulp(0.0) <= unit < math.inf:
        raise ValueError(f"{what}, but 'weight_unit' is {unit!r}: out of range")
    for name in ("sent", "reduced"):
        kept = state.get(name, {})
        if not isinstance(kept, Mapping) or not all(map(_is_dense, kept.values())):
            raise TypeError(
                f"{what}, but {name!r} is not a dictionary of dense floating-point tensors"
            )


def _is_dense(left: Any) -> bool:
    """Return True if this can be a residual: any other object would raise when it is added."""
    return (
        isinstance(left, Tensor)
        and left.is_floating_point()
        and left.layout is torch.strided
        and not left.is_meta
    )
