"""The protocol of a reduction, and the plain all-reduce."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import group_backend
from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.buckets.sparse_bucket import SparseBucket
from tritonddp.comm.sparse import exchange
from tritonddp.coordination import collectives
from tritonddp.coordination.agreement import (
    BYTES,
    Ballot,
    Source,
    check,
    is_alone,
    ranks_with_inputs,
    read,
    total_weight,
)
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import RollCall

logger = logging.getLogger("tritonddp.comm.reduction")

# Unit of weights in the first weighted reduction, before any is known to all ranks: some samples or
# some thousands of tokens are both within a hundredfold of it, for which fp16 has room.
_FIRST_UNIT = 16.0


class LocalError(RuntimeError):
    """What a user has registered failed on this rank. The other ranks go on with the backward."""


class Reduction(Protocol):
    """One way to turn the local gradients of a bucket into their mean over all ranks.

    It owns the pipeline of a bucket (flatten, collective, unflatten) and knows nothing of hooks,
    graphs or other buckets. The reducer starts buckets in bucket order on every rank and finishes
    them in the same order, so the collectives of a reduction match without further agreement.
    """

    @property
    def plain(self) -> Reduction:
        """How gradients are averaged that no backward has put into its buckets.

        Those of parameters that were just added, and those that are reduced on request: this one,
        or another one where it keeps something for each bucket.
        """

    def begin(self, ballot: Ballot, scale: float) -> None:
        """A reduction begins.

        Args:
            ballot: what this rank says to the others.
            scale: by which this rank's gradients are multiplied: its weight, or 1.
        """

    def fill(self, bucket: Bucket, segment: Segment, used: Sequence[bool]) -> None:
        """Flatten a segment of ``bucket``, whose gradients are ready, on the current stream.

        ``used`` says for each of its parameters whether this rank's backward reached it.
        """

    def start(self, bucket: Bucket) -> Work:
        """All segments are filled: issue the collective asynchronously."""

    def start_poisoned(self, bucket: Bucket) -> Work:
        """Take part in the collective of ``bucket`` with NaN instead of gradients.

        For a rank whose backward broke: the collectives of the ranks stay in step, and its peers
        see NaN where they would otherwise get a mean that lacks this rank.
        """

    def finish(self, bucket: Bucket, work: Work) -> None:
        """Wait for the collective and bring the result into ``.grad``.

        Raises:
            StructureMismatch, Disagreement: the ranks do not reduce the same, see
                :func:`tritonddp.coordination.agreement.check`. Nothing has been written then.
        """

    def discard(self, bucket: Bucket, work: Work) -> None:
        """Wait for the collective like :meth:`finish`, but leave ``.grad`` as it is."""

    def settle(self) -> None:
        """Wait for what :meth:`finish` could not tell yet, and raise what it would have raised."""

    def get_unit(self) -> float:
        """In which the next weights are counted, alike on all ranks: it follows the last ones."""

    def set_unit(self, unit: float) -> None:
        """Go on where another reduction was."""


class AllReduce:
    """Mean over ranks by one SUM all-reduce a bucket.

    The factor ``1 / world_size`` is fused into the flatten kernel: SUM, unlike AVG, stays open to
    every NCCL algorithm, and a pre-scaled sum does not overflow in half precision. A weighted mean
    ``sum_r(w_r g_r) / sum_r(w_r)`` takes ``w_r / world_size`` there and ``world_size / sum_r(w_r)``
    in the unflatten kernel: the weights are in the ballots of the first bucket. So is the number of
    ranks that have inputs, for the mean over those.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, counters: Counters, roll_call: RollCall
    ) -> None:
        self._group = process_group
        self._counters = counters
        self._roll_call = roll_call
        self._scale = 1.0 / process_group.size()
        self._ballot: Ballot | None = None
        self._places = b""
        self._unanimous: Tensor | None = None  # the ballots if all ranks say what this one says
        self._factor: Tensor | None = None
        self._unit = _FIRST_UNIT  # of weights, alike on all ranks: about the last ones
        self._unread: tuple[Tensor, torch.cuda.Event] | None = None
        # What was read the last time: pinned memory and events are dear to make.
        self._spare: tuple[Tensor, torch.cuda.Event] | None = None
        self._is_alone = False  # the group exchanges nothing, which was said once
        self._is_logged = False  # each bucket is, in this reduction

    @property
    def plain(self) -> Reduction:
        """See :attr:`Reduction.plain`."""
        return self

    def begin(self, ballot: Ballot, scale: float) -> None:
        """See :meth:`Reduction.begin`."""
        self._scale = scale / self._group.size()
        if ballot.weight is not None:
            self._scale /= self._unit
        self._factor = None
        self._is_logged = logger.isEnabledFor(logging.DEBUG)
        if ballot != self._ballot:
            self._ballot = ballot
            self._places = ballot.places(self._group.rank(), self._group.size())
            self._unanimous = None

    def fill(self, bucket: Bucket, segment: Segment, used: Sequence[bool]) -> None:
        """See :meth:`Reduction.fill`."""
        assert self._ballot is not None
        # A sum counts without a weight; what was reduced before it does not.
        earlier = self._ballot.weight != 0
        bucket.flatten(segment, used, self._scale, self._ballots_of(bucket), earlier)

    def start(self, bucket: Bucket) -> Work:
        """See :meth:`Reduction.start`."""
        bucket.seal(self._ballots_of(bucket))
        if self._is_logged:
            self._log(bucket, "is sent")
        return self._issue(bucket)

    def _ballots_of(self, bucket: Bucket) -> bytes:
        return self._places if bucket.index == 0 else b""

    def _issue(self, bucket: Bucket) -> Work:
        self._counters.collective(bucket.nbytes, self._group.size(), passes=2)
        try:
            return collectives.all_reduce(bucket.flat.data, self._group)
        except RuntimeError as error:
            raise self._explained(bucket, error) from error

    def start_poisoned(self, bucket: Bucket) -> Work:
        """See :meth:`Reduction.start_poisoned`."""
        bucket.poison(self._ballots_of(bucket))
        if self._is_logged:
            self._log(bucket, "is sent with NaN")
        return self._issue(bucket)

    def finish(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`Reduction.finish`."""
        self.discard(bucket, work)
        bucket.unflatten(self._factor)

    def discard(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`Reduction.discard`."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explained(bucket, error) from error
        if self._is_logged:
            # On a GPU the host goes on before it is there.
            is_there = bucket.flat.data.device.type == "cpu"
            self._log(bucket, "is there" if is_there else "is waited for by the device")
        if bucket.index == 0:
            self._look_at(bucket.flat.ballots)
        self._exchange(bucket)

    def _log(self, bucket: Bucket, what: str) -> None:
        logger.debug("%s, %s: %s, %d bytes", self._where(), bucket.title, what, bucket.nbytes)

    def _exchange(self, bucket: Bucket) -> None:
        """The second step of sparse gradients."""
        if not isinstance(bucket, SparseBucket):
            return
        self.settle()  # ranks that do not reduce the same have announced nothing of use
        try:
            exchange(bucket, self._group, self._counters)
        except RuntimeError as error:
            raise self._explained(bucket, error, "exchange of sparse gradients") from error

    def _explained(
        self, bucket: Bucket, error: RuntimeError, what: str | None = None
    ) -> RuntimeError:
        return self._roll_call.explain(
            f"{self._where()}, {bucket.title}",
            what or f"all-reduce of {bucket.nbytes} bytes",
            error,
        )

    def _where(self) -> str:
        assert self._ballot is not None
        requested = ", reduce_gradients()" if self._ballot.source is Source.REQUEST else ""
        return f"rank {self._group.rank()}, step {self._counters.reductions}{requested}"

    def _look_at(self, ballots: Tensor) -> None:
        """Find out the sum of the weights, and whether the ranks reduce the same."""
        assert self._ballot is not None
        if self._ballot.over_present:
            self._factor = (self._group.size() / ranks_with_inputs(ballots)).view(1)
        if self._ballot.weight is not None:
            total = total_weight(ballots).view(1)
            # All weights zero: a mean of nothing, which shall be zero.
            factor = torch.where(total == 0, total, self._group.size() * self._unit / total)
            if self._ballot.source.is_empty:  # the others may have no weights
                without = torch.ones_like(total) if self._factor is None else self._factor
                factor = torch.where(total.isnan(), without, factor)
            self._factor = factor
        if ballots.device.type == "cpu":
            self._check(ballots)
            return
        # The host does not wait for the device here: see settle().
        spare, self._spare = self._spare, None
        if spare is None or not _is_alike(spare[0], ballots):
            spare = torch.empty_like(ballots, device="cpu", pin_memory=True), torch.cuda.Event()
        copy, event = spare
        copy.copy_(ballots, non_blocking=True)
        event.record(torch.cuda.current_stream(ballots.device))
        self._unread = spare

    def _check(self, ballots: Tensor) -> None:
        if self._unanimous is None:
            mine = self._places[self._group.rank() * BYTES :][:BYTES]
            self._unanimous = torch.tensor([*mine] * self._group.size(), dtype=ballots.dtype)
        assert self._ballot is not None
        if self._ballot.weight is not None or not torch.equal(ballots, self._unanimous):
            if is_alone(ballots, self._places):
                self._note_alone()
                return
            said = read(ballots)
            check(said)
            broken = [rank for rank, each in enumerate(said) if each.source is Source.BROKEN]
            if broken and self._ballot.source is not Source.BROKEN:
                logger.warning(
                    "%s: the backward of %s broke off: gradients are NaN in this step",
                    self._where(),
                    " and ".join(f"rank {rank}" for rank in broken),
                )
            self._unit = _unit_of([each.weight for each in said if each.weight])

    def _note_alone(self) -> None:
        if not self._is_alone:
            self._is_alone = True
            logger.warning(
                "%s: no other rank has said anything: this process group (%s) exchanges nothing, "
                "and gradients are not averaged",
                self._where(),
                group_backend(self._group),
            )

    def settle(self) -> None:
        """See :meth:`Reduction.settle`."""
        if self._unread is not None:
            unread, self._unread = self._unread, None
            copy, event = unread
            event.synchronize()
            self._spare = unread  # nothing writes to it any more
            self._check(copy)

    def get_unit(self) -> float:
        """See :meth:`Reduction.get_unit`."""
        return self._unit

    def set_unit(self, unit: float) -> None:
        """See :meth:`Reduction.set_unit`."""
        self._unit = unit


def _is_alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


def _unit_of(weights: Sequence[float]) -> float:
    """A power of two near their mean: divided by it, weights do not overflow a wire of fp16.

    (A power of two rounds nothing.)
    """
    if not weights:
        return _FIRST_UNIT
    return 2.0 ** round(math.log2(sum(weights) / len(weights)))
