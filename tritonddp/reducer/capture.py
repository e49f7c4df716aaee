"""Capture backwards in CUDA graphs, which are replayed without this code.

A replay repeats the captured device work: it flattens, reduces and unflattens the gradients, each
bucket with its own table of addresses. The host takes no part in a replay: it does not compare the
headers of the ranks, and does not notice unused, frozen or added parameters. A backward that needs
the host therefore cannot be captured. Headers of earlier reductions are checked before the capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tritonddp._device import is_capturing, is_default
from tritonddp._torch import moves_nodes_into_captures
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.coordination.failures import listed

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer


def begin(
    reducer: Reducer, streams: Sequence[Any], expected: Sequence[bool], is_reduced: bool
) -> None:
    """Prepare the buckets for a backward that is being captured.

    Args:
        reducer: the reducer of the wrapper.
        streams: streams on which autograd accumulates gradients.
        expected: for each parameter, whether the backward reaches it.
        is_reduced: the backward is reduced, not local.

    Raises:
        RuntimeError: a replay could not do everything that this backward does.
    """
    reducer.check_pending()
    problem = _problem(reducer, streams, expected, is_reduced)
    if problem is not None:
        refuse(reducer.manager.current, reducer.where(), problem)
    reducer.manager.capture()


def refuse(current: BucketSet, where: str, problem: str) -> None:
    """Raise a RuntimeError if a CUDA graph is being captured."""
    if current.is_on_gpu and is_capturing():
        raise RuntimeError(f"{where}, while a CUDA graph is captured: {problem}")


def _problem(
    reducer: Reducer, streams: Sequence[Any], expected: Sequence[bool], is_reduced: bool
) -> str | None:
    """Return why this backward cannot be captured and what to do, or ``None`` if it can."""
    manager, sync = reducer.manager, reducer.sync
    if not is_reduced:
        return (
            "a backward inside no_sync() accumulates gradients, and the host does not notice its "
            "replays. Capture only reduced backwards, or run the accumulating backwards without a "
            "graph"
        )
    if manager.is_provisional:
        return (
            "no backward has been reduced since the module was wrapped. Run one eager step "
            "(forward and backward) on a side stream before the capture"
        )
    if any(map(is_default, streams)) and not moves_nodes_into_captures():
        return (
            "autograd accumulates gradients on the stream on which the module was wrapped. This is "
            "the default stream, which cannot be captured. Wrap the module on a side stream, "
            "inside `with torch.cuda.stream(torch.cuda.Stream())`"
        )
    if not all(expected):
        pairs = zip(manager.current.names, expected, strict=True)
        names = [name for name, comes in pairs if not comes]
        return (
            f"the backward does not use {listed(names)}. In each replay the host would have to "
            "check whether another rank used them. Use all parameters, or freeze these "
            "(requires_grad_(False)) and run two eager steps before the capture"
        )
    if sync.weight is not None:
        return (
            "every replay would use the same n of weighted(n). Run such backwards without a graph"
        )
    asks = [each.reads_device for each in reducer.events.extensions if each.reads_device]
    if any(bucket.storage.is_sparse for bucket in manager.current.buckets):
        asks.append("how many rows the sparse gradients have")
    if asks:
        return (
            f"the host must read from the device {asks[0]}. Disable this feature, or do not use a "
            "graph"
        )
    return None
