"""Unused parameters: raise an error, or skip their buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.agreement import (
    HeaderField,
    Unmatched,
    differ,
    schema_hash,
)
from tritonddp.reducer.deferred import Deferred
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward, SyncState

# Maximum number of names in an error message; the rest is counted.
_SHOWN = 10


def unused_error(where: str, rank: int, unused: Mapping[str, int]) -> str:
    """Return the error message, with the phrases of torch's message that users search for.

    ``unused`` maps names to indices among the parameters that require gradients.
    """
    names = sorted(unused, key=unused.__getitem__)
    debug = dist.get_debug_level() != dist.DebugLevel.OFF
    shown = names if debug else names[:_SHOWN]
    lines = [
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"{where} left {len(names)} parameters without a gradient: they were unused in producing "
        "the loss, which is an error with find_unused_parameters=False.",
        "Leave find_unused_parameters at its default, which detects unused parameters "
        "automatically, or enable this by passing the keyword argument "
        "`find_unused_parameters=True`. If all parameters should be used, make sure that all "
        "`forward` function outputs participate in calculating loss.",
        f"Parameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(map(str, sorted(unused.values())))}",
        f"Parameters which did not receive grad for rank {rank}: {', '.join(shown)}"
        f"{'' if len(shown) == len(names) else f', and {len(names) - len(shown)} more'}",
    ]
    if not debug:
        lines.append(
            f"(To see more than {_SHOWN} names, set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.)"
        )
    return "\n".join(lines)


class StrictUnused(Extension):
    """``find_unused_parameters=False``: raise at the next forward if parameters are unused."""

    def __init__(
        self,
        parameters: ModuleParameters,
        rank: int,
        deferred: Deferred,
        sync: SyncState,
    ) -> None:
        self._parameters, self._rank = parameters, rank
        self._deferred, self._sync = deferred, sync

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Prepare the error for the next forward if the backward left parameters unused."""
        if self._sync.finds_unused is not False:
            return  # the graph was declared static since
        if not reduction.source.is_backward:
            return
        unused = {
            param
            for bucket in reduction.buckets
            for param, is_used in zip(bucket.params, bucket.sent_flags, strict=True)
            if not is_used or bucket.index in reduction.skipped
        }
        if not unused:
            return
        # A parameter that was replaced since is not trained, although another may have its name.
        trainable = enumerate(self._parameters.trainable)
        found = {name: index for index, (name, param) in trainable if param in unused}
        if found:
            error = RuntimeError(unused_error(reduction.where, self._rank, found))
            self._deferred.raise_later(error)


class _Skipped(HeaderField):
    """Hash of the titles of the buckets that are not sent: see :func:`schema_hash`."""

    size = 2

    def encode(self, value: Sequence[str] | None) -> bytes:
        return schema_hash(value)[:2] if value else bytes(2)

    def check(self, values: Mapping[int, Any], whole: Mapping[int, Any], mine: Any) -> None:
        if differ(values):
            raise Unmatched(
                "skip_all_reduce_unused_params=True requires the same parameters to be unused on "
                "all ranks, but the ranks skip different buckets. This rank skips: "
                f"{', '.join(mine or ()) or 'none'}. The process group is unusable: restart with "
                "skip_all_reduce_unused_params=False"
            )


SKIPPED = _Skipped()


class SkipUnused(Extension):
    """``skip_all_reduce_unused_params``: do not send buckets without gradients on any rank.

    The first bucket is always sent: its headers tell whether all ranks skip the same buckets.
    """

    needs_reached = True

    def __init__(self, sync: SyncState) -> None:
        self._sync = sync

    def on_begin(self, backward: Backward) -> None:
        """Determine the buckets to skip: none in a provisional backward and inside ``join()``."""
        reduction = backward.reduction
        if reduction is None or backward.is_provisional:
            return
        if self._sync.join is not None and self._sync.join.is_open:
            return
        skipped = []
        for bucket in reduction.buckets[1:]:
            use, indices = reduction.bucket_set.use, reduction.bucket_set.numbers_of[bucket.index]
            # Awaited parameters may get a gradient although the engine does not announce it.
            if not any(use.flags[each] or each in use.awaited for each in indices):
                skipped.append(bucket.index)
        reduction.skip(skipped)
        titles = [bucket.title for bucket in reduction.buckets if bucket.index in skipped]
        reduction.tell(SKIPPED, titles)
