"""CUDA graphs: backwards that are captured, to be replayed without any of this code.

A replay does on the device what was captured: it gathers the gradients, reduces them and takes them
apart, each bucket with a table of its own. The host takes no part: it neither compares what the
ranks say of themselves nor notices that parameters were unused, frozen or added. So what a replay
could not do is refused when it is captured, and what the ranks said before that is looked at then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tritonddp._device import is_capturing, is_default
from tritonddp._torch import moves_nodes_into_captures
from tritonddp.coordination.agreement import Mismatch
from tritonddp.coordination.failures import listed

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer


def begin(reducer: Reducer, missing: Collection[int], is_reduced: bool) -> None:
    """A backward is captured.

    Args:
        missing: numbers of the parameters that it does not reach.
        is_reduced: not under ``no_sync``.

    Raises:
        RuntimeError: its replays would not do what it does.
    """
    problem = _problem(reducer, missing, is_reduced)
    if problem is not None:
        refuse(reducer, problem)
    for bucket in reducer.manager.current.buckets:
        bucket.capture()
        if bucket not in reducer.captured:
            reducer.captured.append(bucket)


def refuse(reducer: Reducer, problem: str) -> None:
    """Raise a RuntimeError if a CUDA graph is captured now."""
    if reducer.is_on_gpu and is_capturing():
        raise RuntimeError(f"{reducer.where()}, while a CUDA graph is captured: {problem}")


def refuse_mismatch(reducer: Reducer, error: Mismatch) -> None:
    """Likewise, where the ranks were found not to reduce the same in the step before."""
    reducer.agreement.pending = True  # a step without a graph asks the others what differs
    what = str(error) or "the ranks reduce different parameters"
    refuse(reducer, f"{what}. Run one step without a graph before")


def _problem(reducer: Reducer, missing: Collection[int], is_reduced: bool) -> str | None:
    """What is in the way, and what to do."""
    manager, sync = reducer.manager, reducer.sync
    if not is_reduced:
        return (
            "a backward under no_sync accumulates, and the host does not notice its replays: "
            "capture reduced backwards only, or run the accumulating ones without a graph"
        )
    if manager.is_provisional or reducer.parameters.is_uncommitted:
        return (
            "no backward has been reduced since the module was wrapped, or its parameters changed: "
            "run one step, forward and backward, on a side stream before"
        )
    if any(map(is_default, reducer.tracker.streams)) and not moves_nodes_into_captures():
        return (
            "autograd accumulates gradients on the stream that the module was wrapped on, here the "
            "default one, which cannot be captured: wrap it on a side stream, inside "
            "`with torch.cuda.stream(torch.cuda.Stream())`"
        )
    if missing:
        names = [manager.current.names[number] for number in sorted(missing)]
        return (
            f"the backward does not reach {listed(names)}. Whether another rank has used them the "
            "host would have to ask in each replay: use all parameters, or freeze them "
            "(requires_grad_(False)) and run ten steps before"
        )
    if sync.weight is not None:
        return "weighted(n) would mean this n in all replays: run such backwards without a graph"
    if any(bucket.exchange is not None for bucket in manager.current.buckets):
        return "nobody has tried transport='peer_memory' in a graph: use 'auto'"
    asks = [each.reads_device for each in reducer.events.extensions if each.reads_device]
    if any(bucket.is_sparse for bucket in manager.current.buckets):
        asks.append("how many rows the sparse gradients have")
    if manager.planner is not None:
        asks.append('how long backwards take (compression="auto")')
    if asks:
        return f"the host has to ask the device {asks[0]}: do without that, or without a graph"
    return None
