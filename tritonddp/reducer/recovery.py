"""After a backward that failed on one rank: all ranks still make the same collectives."""

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
from tritonddp.reducer.output_hooks import EndsOfBackward

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer

logger = logging.getLogger("tritonddp.in_step")

# How often, and for how many seconds, to wait for a thread that still holds a failed backward.
_TRIES, _PAUSE = 200, 1e-4


def finish_ended(group: Group) -> None:
    """Finish backwards of ``group`` that have ended, if the engine has not yet called for it.

    That is so if a callback of a user, at the end of a backward, runs another forward.
    """
    for reducer in [reference() for reference in list(group.open_runs)]:
        if reducer is not None and reducer.run is not None and reducer.run.is_ended:
            ends = reducer.run.end()
            if isinstance(ends, EndsOfBackward):
                ends.finish()


def recover(group: Group) -> None:
    """Make the collectives of failed backwards, in all wrappers of ``group``.

    Collectives match by order, so each wrapper has to do this before any other collective.
    """
    group.refuse_if_forked()
    finish_ended(group)
    reducers: list[Reducer] = [
        each for each in (reference() for reference in list(group.open_runs)) if each is not None
    ]
    for reducer in sorted(reducers, key=lambda each: each.parameters.number):
        if reducer.in_context is not None:
            in_context.recover(reducer)
        _make_up(reducer)
        reducer.mark_closed()
    group.owing.clear()


def _make_up(reducer: Reducer) -> None:
    """If the last backward failed with an exception: make its remaining collectives.

    The other ranks will launch, or have launched, all collectives of that step. This rank launches
    those that it has not launched yet, with NaN, so that later collectives match again.
    """
    run = reducer.run
    if run is None or run.awaits_finalize or _still_runs(run):
        return
    if run.is_local or run.is_finished:
        reducer.close(run)
        return
    if run.is_captured:  # a capture executes no collective
        reducer.tracker.stop()
        for bucket in run.buckets:
            bucket.discard()
        for call in reducer.events.on_abort:
            call(run)
        reducer.close(run)
        return
    capture.refuse(
        reducer,
        "the last backward did not come to its end, and the other ranks wait for its remaining "
        "buckets: run one step without a graph before",
    )
    unsent = {bucket.index for bucket in run.buckets[len(run.works) :]}.difference(run.skipped)
    logger.warning(
        "%s: the last backward did not come to its end%s",
        reducer.where(),
        # (In a bucket that was sent, a communication hook may have failed.)
        f". On ranks whose backward went on gradients are NaN in this step in {len(unsent)} of "
        f"{len(run.buckets)} buckets, which this rank had not sent"
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
    """Whether its backward has neither ended nor failed.

    When a backward fails on a GPU, ``backward()`` may raise a moment before the thread of the
    device lets the backward go.
    """
    if run.is_ended:  # its end was not called, or was interrupted
        return False
    tries = 0 if run.bucket_set.params[0].is_cpu or current_graph_task_id() != -1 else _TRIES
    while run.end() is not None:
        if tries == 0:
            return True
        tries -= 1
        time.sleep(_PAUSE)
    return False


def shadow_backward(reducer: Reducer, source: GradSource) -> None:
    """Make the collectives of a reduced backward; ``source`` says why this rank runs none.

    The gradients of this rank count as zero. Its ``.grad`` gets the mean, too.
    """
    capture.refuse(
        reducer,
        "this rank has no inputs, and a replay cannot take part in the reduction without them: "
        "use join() without a graph",
    )
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
    """Reduce the gradients of added parameters, in buckets of their own.

    ``run`` is over, and its headers have shown that all ranks have added the same parameters.
    Returns an error of this rank, after which the other ranks go on.
    """
    reducer.agreement.check_pending()
    parameters = reducer.parameters
    params = [param for _, param in parameters.added]
    if reducer.broadcast is not None:
        # (The values are mostly equal already, so a graph that is kept may be used again.)
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
    """Ranks do not reduce the same: wait for all collectives in flight, and raise the error.

    ``run`` is this rank's run, if it is not over; ``named_params`` are the parameters of a
    reduction on request.
    """
    buckets = reducer.manager.current.buckets
    if isinstance(error, SkippedMismatch):  # collectives in flight may never end
        skipped = reducer.skipped_last if run is None else run.skipped
        here = [bucket.title for bucket in buckets if bucket.index in skipped]
        raise RuntimeError(
            f"{reducer.where()}, bucket 0: skip_all_reduce_unused_params=True needs the same "
            "parameters to be unused on all ranks, but the ranks leave out different buckets. "
            f"This rank leaves out: {', '.join(here) or 'none'}. The process group cannot be "
            "used any more: restart with skip_all_reduce_unused_params=False"
        ) from None
    for bucket, work in zip(run.buckets, run.works, strict=False) if run else ():
        if work is None or bucket.index < run.done:  # type: ignore[union-attr]
            continue
        # If the ranks have sent different numbers of buckets, this takes the group's timeout.
        said = str(error) or "the ranks reduce different parameters"
        what = f"all-reduce of {bucket.nbytes} bytes ({said})"
        with reducer.group.guard(f"{reducer.where()}, {bucket.title}", what):
            work.wait()
    if isinstance(error, Disagreement):
        raise RuntimeError(f"{reducer.where()}, bucket 0: {error}") from None
    if reducer.peer_memory is not None:
        reducer.peer_memory.end()  # all ranks reach this line
    reducer.parameters.verify(reducer.where(), named_params)
