"""One reduction, from the first gradient that is packed to the last mean in ``.grad``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from ctypes import string_at
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonddp._device import read_together
from tritonddp.buckets.bucket import Bucket, GradientError, Segment
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.coordination.agreement import Agreement, GradSource
from tritonddp.coordination.peers import PeerError
from tritonddp.kernels.flat_buffer import FlatBuffer

run_logger = logging.getLogger("tritonddp.comm.reduction")
begin_logger = logging.getLogger("tritonddp.in_step")

_wants_flags = attrgetter("wants_flags")


class LocalError(RuntimeError):
    """User code (a hook, for example) failed on this rank. The other ranks finish the backward."""


class Transport(Protocol):
    """One way to turn the local gradients of a bucket into their sum over all ranks.

    Attributes:
        averages: gradients are divided by the number of ranks before they are sent.
    """

    averages: bool

    def launch(self, run: ReductionRun, bucket: Bucket, is_broken: bool = False) -> None:
        """Begin to reduce ``bucket``, which is packed, and append the work to ``run.works``.

        Nothing may come between the two, not even a KeyboardInterrupt: otherwise this rank would
        reduce the bucket again, and its collectives would no longer match those of the others.

        Args:
            is_broken: the bucket holds NaN instead of gradients.
        """

    def wait(self, run: ReductionRun, bucket: Bucket) -> Tensor | None:
        """Wait until the sum is in ``bucket``: on a GPU the current stream does, not the host.

        Returns:
            The factor by which the sum has to be multiplied, fp64 ``(1,)``; ``None`` for 1.

        Raises:
            RuntimeError: the collective failed; the message names the missing ranks.
            Mismatch: the ranks do not reduce the same, see
                :func:`tritonddp.coordination.agreement.check`.
        """


class RunEvents:
    """Callbacks for the progress of a run, see ``Extension``. An empty loop costs no call."""

    on_pack: Sequence[Callable[[ReductionRun, Bucket, Segment], None]] = ()
    on_packed: Sequence[Callable[[ReductionRun, Bucket], None]] = ()
    on_launch: Sequence[Callable[[ReductionRun, Bucket], None]] = ()
    on_launched: Sequence[Callable[[ReductionRun, Bucket, Any], None]] = ()
    on_waited: Sequence[Callable[[ReductionRun, Bucket], None]] = ()
    on_reduced: Sequence[Callable[[ReductionRun, Bucket], None]] = ()
    on_reduced_all: Sequence[Callable[[ReductionRun], None]] = ()


def _nothing() -> None:
    """Stands in for a weak reference to a function that was freed: returns ``None``."""


class ReductionRun:
    """The state of one reduction, from its start to its end.

    Whoever opens a run owes its collectives to the other ranks. :meth:`launch_ready` and
    :meth:`finish` make them; if this rank cannot go on, :meth:`launch_nan` and :meth:`discard` do.

    A *segment* is a range of parameters of one bucket that are flattened together. To *pack* it is
    to flatten its gradients into the bucket. The *header* is what a rank tells the others of the
    reduction, in the first bucket; a *report* is what its extensions add.

    Args:
        bucket_set: the buckets to reduce.
        transport: reduces them.
        agreement: writes the header of this rank, and compares those of all ranks.
        events: callbacks for progress.
        used: for each parameter, whether this rank has a gradient for it.
        source: where the gradients come from.

    Attributes:
        buckets: in launch order.
        where: this rank and its step, for messages.
        is_local: a backward that only accumulates (``no_sync``): there is nothing to launch.
        may_be_reduced: it is local because it has gone through no output of a forward outside
            ``no_sync`` so far.
        is_doubted: it is local, and its gradients should be dropped, or reduced later.
        is_ended: its backward is over, and all buckets are launched.
        is_provisional: the order of gradients is observed, and buckets are launched at the end.
        of_backwards: its gradients come from backwards, not from the user.
        earlier: for each parameter, whether an earlier backward that was not reduced has used it.
        reached: for each parameter, whether the engine has announced its gradient.
        doubtful: parameters that may get a gradient that was not announced.
        schema: hash of the parameters of this run; ``None`` for the trainable ones.
        skipped: indices of buckets that are not sent.
        weight: weight of the gradients of this rank; ``None`` if the mean is not weighted.
        scale: factor of the gradients before they are sent.
        header: header of this rank in bytes, without its report.
        said: the same with its report.
        filled: for each segment, whether it is packed.
        packed_at: for packed segments, how many gradients had come then.
        came: the parameters in the order of their gradients, as far as they have come.
        counts_dropped: a gradient that came, and that a hook has dropped, counts as zero; else the
            parameter counts as unused.
        has_missing: the engine has not announced the gradients of all parameters.
        exchanged: indices of sparse buckets whose rows have been exchanged.
        unfilled: for each bucket, the number of segments, or of other events, that it waits for.
        works: work objects of the launched buckets, in launch order; ``None`` where there is
            nothing to wait for.
        done: number of buckets that are reduced and unpacked.
        arrived: in a provisional run, numbers of parameters in the order of their gradients.
        factor: factor of the sums, once it is known.
        failure: error of user code on this rank, raised after all collectives.
        spoiled: a bucket, not the first, in which NaN is sent, since another was sent wrong.
        is_finished: no collective is left to be made.
        awaits_finalize: its backward is over, and ``finalize_backward()`` will wait for buckets.
        transport_state: private to the transport.
        from_ranks: for buckets that are exchanged directly, by index: a row from each rank.
        is_logged: log each bucket at level DEBUG.
        end: weak reference to the callback at the end of the backward. The engine drops the
            callback if the backward fails.
        graph_task: id of the backward; -1 without one.
        creates_graph: the backward runs with ``create_graph=True``.
        is_alone: there is only one rank, and nothing is exchanged.
        is_late: a gradient had come before the backward was noticed.
        has_headers: the headers of all ranks have been read.
        is_captured: it is captured in a CUDA graph, whose replays make it.
    """

    # Defaults that most runs keep. On the class, so that a run does not have to set them.
    where = ""
    is_local = may_be_reduced = is_doubted = False
    is_ended = False
    is_provisional = False
    is_alone = False
    of_backwards = True
    reached: Sequence[bool] = ()
    doubtful: Collection[int] = ()
    schema: bytes | None = None
    skipped: Collection[int] = ()
    weight: Any = None
    scale = 1.0
    header = said = b""
    arrived: Sequence[int] = ()
    done = 0
    factor: Tensor | None = None
    failure: BaseException | None = None
    spoiled: Bucket | None = None
    awaits_finalize = False
    is_finished = False
    transport_state: Any = None
    from_ranks: dict[int, Tensor] | None = None
    is_logged = False
    came: Sequence[Tensor] = ()
    counts_dropped = True
    has_missing = False
    exchanged: Collection[int] = ()
    graph_task = -1
    creates_graph = False
    is_late = False
    is_captured = False
    has_headers = False

    def __init__(
        self,
        bucket_set: BucketSet,
        transport: Transport,
        agreement: Agreement,
        events: RunEvents,
        used: list[bool],
        source: GradSource,
    ) -> None:
        self.bucket_set = bucket_set
        self.buckets = bucket_set.buckets
        self.transport = transport
        self.agreement = agreement
        self.group = agreement.group
        self.events = events
        self.source = source
        self.used = used
        self.earlier: Sequence[bool] = used
        self.filled = [False] * len(bucket_set.segments)
        self.packed_at: dict[int, int] = {}
        self.unfilled = [0] * len(self.buckets)
        self.works: list[Any] = []
        self.end: Callable[[], object] = _nothing

    # Into the buckets

    def pack(self, number: int) -> None:
        """The gradients of a segment are final: flatten them into its bucket.

        Raises:
            GradientError: a gradient does not fit its parameter.
            RuntimeError: another rank is gone, and has not confirmed that it read the last content.
        """
        bucket, segment = self.bucket_set.segments[number]
        first, last = bucket.first + segment.first, bucket.first + segment.last
        if bucket.before:
            for slot in bucket.unchanged_slots(segment):
                self.used[bucket.first + slot] = self.earlier[bucket.first + slot]
        if bucket.quantization is not None:
            bucket.quantization.rescale(self.agreement.unit)
        for call in self.events.on_pack:
            call(self, bucket, segment)
        # The sum of no items counts all the same, but gradients from before it do not.
        counts_earlier = self.weight is None or self.weight.items != 0
        try:
            bucket.pack(
                segment,
                self.used[first:last],
                self.scale,
                b"" if bucket.index else self.said,
                counts_earlier,
                self.came if self.counts_dropped else (),
            )
        except GradientError as error:
            raise GradientError(f"{self.where}: {error}") from None
        except PeerError as error:
            raise self.explain(bucket, error) from error
        self.filled[number] = True
        self.packed_at[number] = len(self.came)
        for observe in self.events.on_packed:
            observe(self, bucket)

    # On the way

    def launch_ready(self, rest: bool = False, until: int | None = None) -> None:
        """Launch the buckets that have all their gradients, in bucket order.

        Args:
            rest: launch incomplete buckets too: a gradient that has not come counts as zero.
            until: stop before the bucket with this index.
        """
        works, buckets, unfilled = self.works, self.buckets, self.unfilled
        end = len(buckets) if until is None else until
        while len(works) < end and (rest or not unfilled[len(works)]):
            bucket = buckets[len(works)]
            if bucket.index in self.skipped:
                works.append(None)
                continue
            for number in self.bucket_set.segments_of[bucket.index]:
                if not self.filled[number]:
                    if self.has_missing:
                        self._note_came(number)
                    self.pack(number)
            if len(bucket.segments) > 1:
                bucket.finish_trailer(b"" if bucket.index else self.said)
            if is_spoiled := bucket is self.spoiled:
                bucket.overwrite_nan()
            for call in self.events.on_launch:
                call(self, bucket)
            self.transport.launch(self, bucket, is_spoiled)
            for observe in self.events.on_launched:
                observe(self, bucket, works[bucket.index])

    def _note_came(self, number: int) -> None:
        """Mark parameters of this segment as used whose gradients came without announcement."""
        came = set(map(id, self.came))
        for index in self.bucket_set.ranges[number]:
            if not self.used[index]:
                self.used[index] = id(self.bucket_set.params[index]) in came

    def launch_now(self, bucket: Bucket) -> None:
        """Launch the next bucket, with gradients that do not come from a backward of this run.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        bucket.prepare()
        try:
            bucket.to_slot_layout()
        except GradientError as error:
            raise GradientError(f"{self.where}: {error}") from None
        self.launch_ready(rest=True, until=bucket.index + 1)

    def launch_nan(self) -> None:
        """Launch all remaining buckets, with NaN instead of gradients.

        So the collectives of the ranks match, and the others get NaN, not a mean without this rank.
        """
        while len(self.works) < len(self.buckets):
            bucket = self.buckets[len(self.works)]
            if bucket.index in self.skipped:
                self.works.append(None)
                continue
            try:
                bucket.fill_nan(b"" if bucket.index else self.said)
            except PeerError as error:
                raise self.explain(bucket, error) from error
            self.transport.launch(self, bucket, is_broken=True)

    # Back

    def finish(self) -> None:
        """Wait for the buckets in launch order, unpacking one while the next is on its way.

        Raises:
            RuntimeError: a collective failed, or the ranks do not reduce the same; see
                :meth:`Transport.wait`.
            LocalError: user code failed on this rank.
        """
        events, works = self.events, self.works
        if any(map(_wants_flags, self.buckets)):
            self._read_flags()
        while self.done < len(works):
            bucket = self.buckets[self.done]
            if works[self.done] is None:
                self.done += 1
                continue
            factor = self.transport.wait(self, bucket)
            if self.failure is not None:
                raise self.failure
            for call in events.on_waited:
                call(self, bucket)
            bucket.unpack(factor)
            self.done += 1
            works[bucket.index] = None
            for call in events.on_reduced:
                call(self, bucket)
        if self.agreement.pending:
            self.agreement.keep_order()

    def _read_flags(self) -> None:
        """On a GPU: used flags that the host has to know, in one copy for all buckets."""
        asking = [
            bucket
            for bucket in self.buckets[self.done :]
            if bucket.wants_flags
            and self.works[bucket.index] is not None
            and not bucket.flat.data.is_cpu
        ]
        if not asking:
            return
        for bucket in self.buckets[self.done : asking[-1].index + 1]:
            if self.works[bucket.index] is not None:
                self.transport.wait(self, bucket)
        flags = read_together([bucket.flat.flags for bucket in asking])
        for bucket, each in zip(asking, flags, strict=True):
            bucket.flags_on_host = each.tolist()

    def discard(self) -> None:
        """Wait for the launched buckets, and leave ``.grad`` as it is."""
        while self.done < len(self.works):
            bucket = self.buckets[self.done]
            if self.works[self.done] is not None:
                self.transport.wait(self, bucket)
                self.works[self.done] = None
                bucket.discard()
            self.done += 1

    @torch.no_grad()
    def reduce_now(self) -> None:
        """Replace ``.grad`` of all parameters by their mean over the ranks.

        For gradients that do not come from a backward of this run. If one cannot be reduced, all
        collectives are made before the error is raised, so that the other ranks do not hang.

        Raises:
            GradientError: a gradient does not fit its parameter.
            RuntimeError: see :meth:`finish`.
        """
        try:
            for bucket in self.buckets:
                self.launch_now(bucket)
        except BaseException:
            self.launch_nan()
            self.discard()
            raise
        self.finish()
        self.agreement.check_pending()
        for call in self.events.on_reduced_all:
            call(self)

    @torch.no_grad()
    def take_part(self) -> None:
        """Make the collectives of :meth:`reduce_now` on a rank whose backward failed."""
        self.launch_nan()
        self.discard()

    # For transports

    def read_trailer(self, bucket: Bucket, work: Any = None) -> Tensor | None:
        """Read the trailer (used flags and headers) of ``bucket``, which holds the sum.

        Returns the factor, see :meth:`Transport.wait`.

        Args:
            bucket: its trailer differs from that of the last reduction. The result is cached.
            work: of the first bucket, if it may be on a GPU: see :meth:`Agreement.read`.

        Raises:
            Mismatch: the ranks do not reduce the same.
        """
        flat = bucket.flat
        flat.known_flags = None
        if bucket.index == 0:
            self.read_headers(flat.headers, work)
        if (
            flat.data.is_cpu
            and self.agreement.is_unanimous
            and type(flat) is FlatBuffer
            and not bucket.is_sparse
        ):
            trailer = string_at(flat.trailer.data_ptr(), flat.trailer_nbytes)
            last, size = bucket.last_trailer, flat.flags_nbytes
            if last is not None and trailer[:size] == last[1][:size]:
                flags = last[2]
            else:
                found = flat.flags.tolist()
                flags = () if all(found) else found
            bucket.last_trailer = self.header, trailer, flags
            flat.known_flags = flags
        return self.factor

    def read_headers(self, headers: Tensor, work: Any = None) -> None:
        """Read the headers of all ranks in the first bucket; see :meth:`Agreement.read`."""
        if not self.has_headers:
            self.factor = self.agreement.read(headers, self.where, work)
            self.has_headers = True

    def explain(
        self, bucket: Bucket, error: BaseException, what: str | None = None
    ) -> RuntimeError:
        """The error to raise if a collective of ``bucket`` failed."""
        return self.group.explain(
            f"{self.where}, {bucket.title}",
            what or f"all-reduce of {bucket.nbytes} bytes",
            error,
        )

    def log_begin(self, schema: bytes) -> None:
        """Log the header of this rank at level DEBUG."""
        begin_logger.debug(
            "%s: a reduction begins: %s, %s, hash of its parameters %s, buckets left out: %s",
            self.where,
            self.source.words,
            "no weight" if self.weight is None else f"weight {self.weight.items:g}",
            schema.hex(),
            list(self.skipped) or "none",
        )

    def log(self, bucket: Bucket, what: str) -> None:
        """Log the progress of ``bucket`` at level DEBUG."""
        run_logger.debug("%s, %s: %s, %d bytes", self.where, bucket.title, what, bucket.nbytes)
