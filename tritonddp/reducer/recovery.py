"""All ranks make the same collectives, whatever has become of their backwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.nn import Parameter

from tritonddp._torch import current_graph_task_id, preserve_version_counters
from tritonddp.buckets.bucket import GradientError
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.agreement import (
    NOTHING,
    Disagreement,
    GradSource,
    Mismatch,
    SkippedMismatch,
)
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.reducer import capture, in_context

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer

logger = logging.getLogger("tritonddp.in_step")

# How often, and for how many seconds, a thread that lets a backward go is waited for.
_TRIES, _PAUSE = 200, 1e-4


def recover(group: Group) -> None:
    """Make up for what broke off, in all wrappers of ``group``: collectives match by order."""
    group.refuse_if_forked()
    reducers: list[Reducer] = [
        each for each in (reference() for reference in list(group.open_runs)) if each is not None
    ]
    for reducer in sorted(reducers, key=lambda each: each.parameters.number):
        if reducer.in_context is not None:
            in_context.recover(reducer)
        _make_up(reducer)
        reducer.mark_closed()


def _make_up(reducer: Reducer) -> None:
    """If the last backward broke off with an exception: leave no collective half-done.

    The other ranks will issue, or have issued, all collectives of that step. This rank takes
    part in those it has not launched yet, with NaN, so that the ranks are in step again.
    """
    run = reducer.run
    if run is None or run.awaits_finalize or _still_runs(run):
        return
    if run.is_local or run.is_finished:
        reducer.close(run)
        return
    if run.is_captured:  # none of it has been made, on no rank
        reducer.tracker.stop()
        for bucket in run.buckets:
            bucket.discard()
        for call in reducer.events.on_abort:
            call(run)
        reducer.close(run)
        return
    capture.refuse(
        reducer,
        "the last backward did not come to its end, and the other ranks wait for the rest: run one "
        "step without a graph before",
    )
    unsent = {bucket.index for bucket in run.buckets[len(run.works) :]}.difference(run.skipped)
    logger.warning(
        "%s: the last backward did not come to its end%s",
        reducer.where(),
        # Of those that were, a communication hook may have failed.
        f". On the other ranks gradients are NaN in this step in {len(unsent)} of "
        f"{len(run.buckets)} buckets, which had not been sent"
        if unsent
        else "",
    )
    reducer.tracker.stop()
    with Uninterrupted(), torch.no_grad():
        try:
            if not run.works:
                run.source, run.weight = GradSource.BROKEN, None
                reducer.announce(run)
            run.launch_nan()
            run.discard()
            run.arrived = reducer.tracker.arrivals()
            run.source = GradSource.BROKEN
            reducer.after_reduction(run)
        except Mismatch as error:
            raise_mismatch(reducer, error, run)
        finally:
            for call in reducer.events.on_abort:
                call(run)
            reducer.close(run)


def _still_runs(run: ReductionRun) -> bool:
    """Whether its backward has not come to its end, and has not broken off.

    Where one breaks off on a GPU, the thread of the device may hold it a moment longer than the
    caller of ``backward()``, who has had the exception.
    """
    tries = 0 if run.bucket_set.params[0].is_cpu or current_graph_task_id() != -1 else _TRIES
    while run.end() is not None:
        if tries == 0:
            return True
        tries -= 1
        time.sleep(_PAUSE)
    return False


def shadow_backward(reducer: Reducer, source: GradSource) -> None:
    """Make the collectives of a reduced backward; ``source`` says why this rank has none.

    Its gradients count as zero. Those of the other ranks come into ``.grad`` here too.
    """
    capture.refuse(reducer, "a rank without inputs takes part by what no replay does")
    reducer.check_pending()
    reducer.parameters.register()
    reducer.counters.reductions += 1
    reducer.manager.reduction_begins()
    current = reducer.manager.current
    run = ReductionRun(
        *(current, reducer.transport, reducer.agreement, reducer.events),
        *([False] * len(current.params), source),
    )
    run.weight, run.where = NOTHING, reducer.where()
    reducer.announce(run)
    try:
        with Uninterrupted(), torch.no_grad():
            run.reduce_now()
            reducer.after_reduction(run)
    except Mismatch as error:
        raise_mismatch(reducer, error, run)
    finally:
        for bucket in reducer.manager.current.to_release:
            bucket.release()
    for call in reducer.events.on_end:
        call(run)


def take_up_added(reducer: Reducer, run: ReductionRun) -> GradientError | None:
    """Reduce the gradients of parameters that were added, in buckets of their own.

    ``run`` is over, and has told that all ranks have added the same. What is returned is an error
    of this rank alone: the others go on.
    """
    reducer.agreement.check_pending()
    parameters = reducer.parameters
    params = [param for _, param in parameters.added]
    if reducer.broadcast is not None:
        # Mostly of values that are alike already: a graph that is kept may be used again.
        with preserve_version_counters(params):
            names = [name for name, _ in parameters.added]
            reducer.broadcast.send(
                [param.detach() for param in params],
                f"step {reducer.counters.reductions}",
                f"parameters that were added ({listed(names)})",
            )
    is_empty = run.source.is_empty
    added = ReductionRun(
        *(reducer.manager.temporary(parameters.added), reducer.plain, reducer.agreement),
        reducer.events,
        [not is_empty and parameters.has_new_gradient(param) for param in params],
        run.source,
    )
    # (Buckets may hold them in another order than the module.)
    of = dict(zip(params, added.used, strict=True))
    added.used = [of[param] for param in added.bucket_set.params]
    added.weight, added.where = NOTHING if is_empty else run.weight, run.where
    reducer.announce(added)
    try:
        if run.source is GradSource.BROKEN:
            added.take_part()
        else:
            added.reduce_now()
    except GradientError as error:
        return error
    return None


def raise_mismatch(
    reducer: Reducer,
    error: Exception,
    run: ReductionRun | None,
    named_params: Sequence[tuple[str, Parameter]] | None = None,
) -> NoReturn:
    """Ranks do not reduce the same: the error, when nothing is under way any more.

    ``run`` is this rank's, if it is not over; ``named_params`` what is reduced on request.
    """
    buckets = reducer.manager.current.buckets
    if isinstance(error, SkippedMismatch):  # what is under way may never end
        skipped = reducer.skipped_last if run is None else run.skipped
        here = [bucket.title for bucket in buckets if bucket.index in skipped]
        raise RuntimeError(
            f"{reducer.where()}, bucket 0: skip_all_reduce_unused_params=True needs parameters "
            "that are unused on all ranks alike, but the ranks leave out different buckets. "
            f"Here these are left out: {', '.join(here) or 'none'}. The process group is of "
            "no use any more: leave skip_all_reduce_unused_params off"
        ) from None
    for bucket, work in zip(run.buckets, run.works, strict=False) if run else ():
        if work is None or bucket.index < run.done:  # type: ignore[union-attr]
            continue
        # Where the ranks have not sent as many buckets, that takes the group's timeout.
        said = str(error) or "the ranks reduce different parameters"
        what = f"all-reduce of {bucket.nbytes} bytes ({said})"
        with reducer.group.guard(f"{reducer.where()}, {bucket.title}", what):
            work.wait()
    if isinstance(error, Disagreement):
        raise RuntimeError(f"{reducer.where()}, bucket 0: {error}") from None
    if reducer.peer_memory is not None:
        reducer.peer_memory.end()  # all ranks come to this comparison
    reducer.parameters.verify(reducer.where(), named_params)
