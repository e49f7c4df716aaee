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
    """What a user has registered failed on this rank. The other ranks go on with the backward."""


class Transport(Protocol):
    """One way to turn the local gradients of a bucket into their sum over all ranks.

    Attributes:
        averages: gradients are divided by the number of ranks before they are sent.
    """

    averages: bool

    def launch(self, run: ReductionRun, bucket: Bucket, is_broken: bool = False) -> None:
        """Begin to reduce ``bucket``, which is packed, and append the work to ``run.works``.

        Nothing may come between the two, not even a KeyboardInterrupt: the rank would reduce the
        bucket again, and its collectives match those of the others no more.

        Args:
            is_broken: it holds NaN instead of gradients.
        """

    def wait(self, run: ReductionRun, bucket: Bucket) -> Tensor | None:
        """Wait until the sum is in ``bucket``: on a GPU the current stream does, not the host.

        Returns:
            The factor by which it has to be multiplied, fp64 ``(1,)``; ``None`` for 1.

        Raises:
            RuntimeError: the collective failed; says which ranks are missing.
            Mismatch: the ranks do not reduce the same, see
                :func:`tritonddp.coordination.agreement.check`.
        """


class RunEvents:
    """Whom a run tells of its progress: see ``Extension``. Loops over nobody cost no call."""

    on_pack: Sequence[Callable[[ReductionRun, Bucket, Segment], None]] = ()
    on_packed: Sequence[Callable[[ReductionRun, Bucket], None]] = ()
    on_launch: Sequence[Callable[[ReductionRun, Bucket], None]] = ()
    on_launched: Sequence[Callable[[ReductionRun, Bucket, Any], None]] = ()
    on_waited: Sequence[Callable[[ReductionRun, Bucket], None]] = ()
    on_reduced: Sequence[Callable[[ReductionRun, Bucket], None]] = ()
    on_reduced_all: Sequence[Callable[[ReductionRun], None]] = ()


def _nothing() -> None:
    """What a weak reference to a function that is gone returns."""


class ReductionRun:
    """All that is known of one reduction, and that dies with it.

    Whoever opens a run has promised its collectives to the other ranks: :meth:`launch_ready` and
    :meth:`finish` make them, or, if this rank cannot go on, :meth:`launch_nan` and :meth:`discard`.

    Args:
        bucket_set: what is reduced.
        transport: how.
        agreement: what this rank says to the others, and what they say.
        events: whom to tell.
        used: for each parameter, whether its gradient counts as one of this rank.
        source: where the gradients come from.

    Attributes:
        buckets: in launch order.
        where: this rank and its step, for messages.
        is_local: a backward that only accumulates (``no_sync``): there is nothing to launch.
        is_provisional: the order of gradients is observed, and buckets are launched at the end.
        of_backwards: its gradients are those of backwards, and not given by the user.
        earlier: for each parameter, whether a backward before this one has used it.
        reached: for each parameter, whether the engine has announced its gradient.
        doubtful: parameters that may get a gradient which was not announced.
        schema: hash of what is reduced, ``None`` for that of what is trained.
        skipped: indices of buckets that are not sent.
        weight: how much the gradients count, ``None`` for as much as others'.
        scale: by which gradients are multiplied before they are sent.
        header: what this rank says, as bytes for the first bucket, but for its report.
        said: the same with its report.
        filled: for each segment, whether it is packed.
        packed_at: for segments, how many gradients had come then.
        came: the parameters in the order of their gradients, as far as they have come.
        has_missing: the engine has not announced the gradients of all parameters.
        exchanged: indices of sparse buckets whose rows have been exchanged.
        unfilled: for each bucket, how many segments or others it waits for.
        works: of the buckets that are launched, in launch order; ``None`` where there is nothing
            to wait for.
        done: how many buckets are back.
        arrived: where it is provisional, numbers of parameters in the order of their gradients.
        factor: by which the sums are to be multiplied, once it is known.
        failure: of a function of the user on this rank, raised when all collectives are made.
        is_finished: nothing is left to be made with the other ranks.
        awaits_finalize: its backward is over, and the caller says when buckets are waited for.
        transport_state: what the transport keeps of this run.
        from_ranks: of buckets that are exchanged directly, by index: a row from each rank.
        is_logged: each bucket is told at level DEBUG.
        end: what the engine calls at the end of the backward, weakly: it lets it go when the
            backward breaks off.
        graph_task: id of the backward; -1 without one.
        creates_graph: the backward runs with ``create_graph=True``.
        is_alone: it is of the only rank, and nothing is exchanged.
        is_late: its first gradient had come when it was noticed.
        has_headers: those of all ranks have been read, once.
        is_captured: it goes into a CUDA graph, and is made by its replays.
    """

    # What most runs leave as it is: an attribute that is not set costs nothing.
    where = ""
    is_local = False
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
    awaits_finalize = False
    is_finished = False
    transport_state: Any = None
    from_ranks: dict[int, Tensor] | None = None
    is_logged = False
    came: Sequence[Tensor] = ()
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
        """The gradients of a segment are final: bring them into its bucket.

        Raises:
            GradientError: a gradient does not fit its parameter.
            RuntimeError: another rank is gone that may still read what was packed before.
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
        # A sum counts without a weight; what was reduced before it does not.
        counts_earlier = self.weight is None or self.weight.items != 0
        try:
            bucket.pack(
                segment,
                self.used[first:last],
                self.scale,
                b"" if bucket.index else self.said,
                counts_earlier,
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
            rest: also those that have not: a gradient that has not come counts as zero.
            until: none from this index on.
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
            for call in self.events.on_launch:
                call(self, bucket)
            self.transport.launch(self, bucket)
            for observe in self.events.on_launched:
                observe(self, bucket, works[bucket.index])

    def _note_came(self, number: int) -> None:
        """A segment has gradients that were not announced: those that came all the same count."""
        came = set(map(id, self.came))
        for index in self.bucket_set.ranges[number]:
            if not self.used[index]:
                self.used[index] = id(self.bucket_set.params[index]) in came

    def launch_now(self, bucket: Bucket) -> None:
        """Launch the next bucket, whose gradients no backward of this run has made.

        Raises:
            GradientError: one does not fit its parameter.
        """
        bucket.prepare()
        try:
            bucket.to_slot_layout()
        except GradientError as error:
            raise GradientError(f"{self.where}: {error}") from None
        self.launch_ready(rest=True, until=bucket.index + 1)

    def launch_nan(self) -> None:
        """Take part in what is not launched yet with NaN instead of gradients.

        So the collectives of the ranks match, and the others see NaN where they would otherwise
        get a mean that lacks this rank.
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
            LocalError: something of the user's failed on this rank.
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
        """Wait for what is on its way, and leave ``.grad`` as it is."""
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

        For gradients that no backward of this run has made. Where one cannot be reduced, all
        collectives are made before the error is raised: the other ranks are not left waiting.

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
        """Make the collectives of :meth:`reduce_now` on a rank that has nothing to offer."""
        self.launch_nan()
        self.discard()

    # For transports

    def read_trailer(self, bucket: Bucket, work: Any = None) -> Tensor | None:
        """The sum is in ``bucket``, and its trailer is not that of the last reduction.

        Returns the factor, see :meth:`Transport.wait`.

        Args:
            bucket: what is read of its trailer is kept until it is another one.
            work: of the first bucket, where it may be that of a GPU: see :meth:`Agreement.read`.

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
        """The headers of all ranks are there, in the first bucket; see :meth:`Agreement.read`."""
        if not self.has_headers:
            self.factor = self.agreement.read(headers, self.where, work)
            self.has_headers = True

    def explain(
        self, bucket: Bucket, error: BaseException, what: str | None = None
    ) -> RuntimeError:
        """The error to raise where a collective of ``bucket`` failed."""
        return self.group.explain(
            f"{self.where}, {bucket.title}",
            what or f"all-reduce of {bucket.nbytes} bytes",
            error,
        )

    def log_begin(self, schema: bytes) -> None:
        """Tell at level DEBUG what this rank says to the others."""
        begin_logger.debug(
            "%s: a reduction begins: %s, %s, hash of what is trained %s, buckets left out: %s",
            self.where,
            self.source.words,
            "no weight" if self.weight is None else f"weight {self.weight.items:g}",
            schema.hex(),
            list(self.skipped) or "none",
        )

    def log(self, bucket: Bucket, what: str) -> None:
        """Tell of ``bucket`` at level DEBUG."""
        run_logger.debug("%s, %s: %s, %d bytes", self.where, bucket.title, what, bucket.nbytes)
