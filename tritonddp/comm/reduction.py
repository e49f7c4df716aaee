"""One reduction, from the first packed gradient to the last mean in ``.grad``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ctypes import string_at
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonddp._device import read_together
from tritonddp._torch import is_profiling
from tritonddp.buckets.bucket import Bucket, GradientError, Segment
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.grad_storage.grad_storage import JointUnpack
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.sparse import exchange_rows
from tritonddp.comm.weights import Weights
from tritonddp.coordination.agreement import SCHEMA, SOURCE, Agreement, GradSource, HeaderField
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.peers import PeerError

logger = logging.getLogger(__name__)

_NO_VALUES: Mapping[HeaderField, Any] = {}
_wants_flags, _default_of = attrgetter("storage.wants_flags"), attrgetter("default")


class LocalError(RuntimeError):
    """User code (for example a hook) failed on this rank. The other ranks finish the backward."""


class ExchangeError(RuntimeError):
    """A collective for several buckets failed. An exchange raises this from the cause.

    Args:
        buckets: the buckets of the collective, for the message.
        what: the collective.
    """

    def __init__(self, buckets: str, what: str) -> None:
        super().__init__(f"{buckets}, {what}")
        self.buckets, self.what = buckets, what


class ReductionEvents:
    """Callbacks for the progress of a reduction, see ``Extension``. Empty ones cost no call."""

    on_pack: Sequence[Callable[[Reduction, Bucket, Segment], None]] = ()
    on_launch: Sequence[Callable[[Reduction, Bucket], None]] = ()
    on_reduced: Sequence[Callable[[Reduction, Bucket], None]] = ()
    on_reduced_all: Sequence[Callable[[Reduction], None]] = ()
    needs_buckets = False  # True if any of these has a callback


@dataclass(eq=False, kw_only=True)
class Reduction:
    """Replaces the gradients of this rank by the mean over all ranks, once.

    A rank that opens a reduction owes its collectives to the other ranks: :meth:`launch_ready` and
    :meth:`finish` run them. If this rank cannot continue, :meth:`abandon` and :meth:`drain` run
    them instead.

    A *segment* is a range of parameters of one bucket that are flattened together. To *pack* a
    segment is to flatten its gradients into the bucket. The *header* is the information about the
    reduction that a rank sends to the other ranks in the first bucket.

    Attributes:
        bucket_set: the buckets of its parameters.
        buckets: buckets to reduce, in launch order; empty if ``is_alone``.
        agreement: writes the header of this rank, and compares the headers of all ranks.
        weights: header field of the ranks' weights.
        events: callbacks for progress.
        source: where the gradients come from.
        where: this rank and its step, for messages.
        values: values that this rank sends in its header, see :meth:`tell`.
        over_present: inside ``join()``: the mean is over the ranks that have inputs.
        is_alone: ``world_size == 1``, and no bucket is needed.
        skipped: indices of buckets that are not sent.
        header: the header that this rank writes into the first bucket.
        packed: for each segment, 0 until it is packed; then 1 plus the number of ready gradients.
        scale: factor of the gradients before the sum.
        pending: for each bucket, the number of segments, or of other events, that it waits for.
        works: work objects of the launched buckets, in launch order; ``None`` if there is
            nothing to wait for.
        done: number of buckets that are reduced and unpacked.
        factor: factor of the sums, when it is known.
        is_captured: the reduction is captured in a CUDA graph, whose replays run it.
    """

    bucket_set: BucketSet
    buckets: Sequence[Bucket]
    agreement: Agreement
    weights: Weights
    events: ReductionEvents
    source: GradSource
    where: str
    values: dict[HeaderField, Any]
    over_present: bool
    packed: list[int]
    pending: list[int]
    is_alone: bool = False
    is_captured: bool = False
    works: list[Any] = field(default_factory=list)
    # Fields below stay on the class until they are set.
    skipped: Collection[int] = field(default=(), init=False)
    header: bytes = field(default=b"", init=False)
    scale: float = field(default=1.0, init=False)
    done: int = field(default=0, init=False)
    factor: Tensor | None = field(default=None, init=False)
    # Bucket to send with NaN, because an earlier bucket was sent with wrong content.
    _spoiled: Bucket | None = field(default=None, init=False)
    _has_exchanged: bool = field(default=False, init=False)  # rows of sparse gradients
    _has_headers: bool = field(default=False, init=False)  # headers of all ranks were read
    _is_logged: bool = field(default=False, init=False)  # log each bucket at level DEBUG

    # Before the first bucket

    def tell(self, field: HeaderField, value: Any) -> None:
        """Send this value to all ranks. Call it before the first bucket is packed."""
        self.values[field] = value

    def skip(self, indices: Collection[int]) -> None:
        """Do not send these buckets: the same ones on all ranks, never the first bucket."""
        self.skipped = indices
        for index in indices:
            for segment_index in self.bucket_set.segments_of[index]:
                self.packed[segment_index] = 1  # these segments are never packed

    def hold(self, index: int) -> None:
        """Do not launch this bucket and later buckets before the end of the backward."""
        self.pending[index] += 1

    def _make_header(self) -> None:
        """Prepare the header of this rank."""
        agreement, weight = self.agreement, self.values.get(self.weights)
        self.values[SOURCE] = self.source
        # Copy the current defaults: a signal handler may change one while a header is made.
        key = self.values, list(map(_default_of, agreement.fields))
        if key != agreement.key:
            agreement.open(*key)
        self.header = agreement.sent.encoded
        self.scale = 1.0 if weight is None else weight.scale / self.weights.unit
        if self.bucket_set.averages:  # communication hooks divide by the number of ranks
            self.scale /= self.weights.divisor
        self._is_logged = logger.isEnabledFor(logging.DEBUG)
        if is_profiling() or self.bucket_set.spans is not None:
            self.bucket_set.renew_spans()
        if self._is_logged:
            logger.debug(
                "%s: reduction starts: %s, %s, parameter hash %s, skipped buckets: %s",
                self.where,
                self.source.words,
                "no weight" if weight is None else f"weight {weight.items:g}",
                self.values[SCHEMA].hex(),
                list(self.skipped) or "none",
            )

    # Into the buckets

    def pack(self, segment_index: int, launches: bool = False) -> None:
        """Flatten the final gradients of a segment into its bucket.

        Args:
            segment_index: index in the bucket set.
            launches: if the bucket is full now, launch it and any full buckets after it.

        Raises:
            GradientError: a gradient does not fit its parameter.
            RuntimeError: another rank has exited before it confirmed that it read the last
                content; or a collective failed.
        """
        if not self.header:
            self._make_header()
        bucket, segment = self.bucket_set.segments[segment_index]
        use, indices = self.bucket_set.use, self.bucket_set.ranges[segment_index]
        if bucket.quantization is not None:
            bucket.quantization.rescale(self.weights.unit)
        for call in self.events.on_pack:
            call(self, bucket, segment)
        # With a weight of zero items, a sum still counts, but gradients of earlier backwards do
        # not.
        weight = self.values.get(self.weights)
        counts_earlier = weight is None or weight.items != 0
        try:
            if (before_pack := bucket.exchange.before_pack) is not None:
                before_pack()
            bucket.storage.pack(
                bucket,
                segment,
                use.flags[indices.start : indices.stop],
                self.scale,
                b"" if bucket.index else self.header,
                earlier=counts_earlier,
                count_missing=use.count_missing,
            )
        except GradientError as error:
            raise GradientError(f"{self.where}: {error}") from None
        except PeerError as error:
            raise self.explain(bucket, error) from error
        self.packed[segment_index] = 1 + len(use.ready)
        self.pending[bucket.index] -= 1
        if launches and not self.pending[bucket.index]:
            index, works = bucket.index, self.works
            if (
                segment.is_whole
                and len(works) == index
                and not (self._is_logged or self.events.needs_buckets or self.skipped)
                and self._spoiled is None
            ):
                # Fast path of launch_ready(), which checks more.
                try:
                    works.append(bucket.exchange.launch(bucket))
                except RuntimeError as error:
                    raise self.explain(bucket, error) from error
                if bucket is self.buckets[-1] or self.pending[index + 1]:
                    return
            self.launch_ready()

    # Launch

    def launch_ready(self, rest: bool = False, until: int | None = None) -> None:
        """Launch the buckets that have all their gradients, in bucket order.

        Args:
            rest: launch incomplete buckets, too: a missing gradient counts as zero.
            until: stop before the bucket with this index.
        """
        works, buckets, pending = self.works, self.buckets, self.pending
        end = len(buckets) if until is None else until
        while len(works) < end and (rest or not pending[len(works)]):
            bucket = buckets[len(works)]
            if bucket.index in self.skipped:
                works.append(None)
                continue
            for segment_index in self.bucket_set.segments_of[bucket.index]:
                if not self.packed[segment_index]:
                    self.bucket_set.use.note_ready(self.bucket_set.ranges[segment_index])
                    self.pack(segment_index)
            if len(bucket.segments) > 1:
                bucket.finish_trailer(b"" if bucket.index else self.header)
            if is_spoiled := bucket is self._spoiled:
                bucket.storage.overwrite_nan(bucket)
            for call in self.events.on_launch:
                call(self, bucket)
            if self._is_logged:
                self._log_launch(bucket, is_spoiled)
            try:
                works.append(bucket.exchange.launch(bucket, is_spoiled))
            except RuntimeError as error:
                raise self.explain(bucket, error) from error

    def launch_now(self, bucket: Bucket) -> None:
        """Launch the next bucket with gradients that do not come from a running backward.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        bucket.release()
        try:
            bucket.copy_to_slot_layout()
        except GradientError as error:
            raise GradientError(f"{self.where}: {error}") from None
        self.launch_ready(rest=True, until=bucket.index + 1)

    def spoil(self, bucket: Bucket) -> None:
        """Send NaN in ``bucket`` (not the first), because an earlier bucket was sent too early."""
        self._spoiled = bucket

    @torch.no_grad()
    def abandon(self) -> None:
        """Launch all remaining buckets with NaN, because this rank cannot continue.

        The collectives of the ranks then match, and the other ranks get NaN instead of a mean
        without this rank. :meth:`drain` waits for the buckets.
        """
        self.source = GradSource.BROKEN
        if not self.works:  # the header can still report this to the other ranks
            self.tell(self.weights, None)
            self.header = b""
        self._launch_nan()

    def _launch_nan(self, until: int | None = None) -> None:
        if not self.header:
            self._make_header()
        end = len(self.buckets) if until is None else until
        while len(self.works) < end:
            bucket = self.buckets[len(self.works)]
            if bucket.index in self.skipped:
                self.works.append(None)
                continue
            if self._is_logged:
                self._log_launch(bucket, is_broken=True)
            try:
                if (before_pack := bucket.exchange.before_pack) is not None:
                    before_pack()
                bucket.storage.fill_nan(bucket, b"" if bucket.index else self.header)
                self.works.append(bucket.exchange.launch(bucket, is_broken=True))
            except RuntimeError as error:
                raise self.explain(bucket, error) from error

    # Wait and unpack

    def finish(self, discards: bool = False) -> None:
        """Wait for the buckets in launch order; unpack each one while later ones are in flight.

        Args:
            discards: leave ``.grad`` unchanged.

        Raises:
            RuntimeError: a collective failed.
            Mismatch: the ranks reduced different gradients, see :meth:`Agreement.check`.
            LocalError: user code failed on this rank.
        """
        events, works = self.events, self.works
        groups: Iterable[tuple[Bucket, JointUnpack | None]] = ()
        flags: dict[int, Sequence[float]] = {}
        if not discards and any(map(_wants_flags, self.buckets)):
            flags = self._read_flags()
        elif (
            self.buckets  # empty if world_size == 1: the gradients are the mean
            and not (self._is_logged or events.needs_buckets or self.skipped)
            and not (discards or self.done)
        ):
            groups = self.bucket_set.unpack_groups
        for bucket, joint in groups or zip(self.buckets[self.done : len(works)], repeat(None)):
            work = works[bucket.index]
            if work is None:
                self.done = bucket.index + 1
                continue
            exchange, factor = bucket.exchange, None
            try:
                factor = exchange.wait(bucket, work)
            except RuntimeError as error:
                self._wait_failed(bucket, error, discards)
            if not self._has_headers:  # they are in the first bucket, which is first here
                self._check_headers()
            if joint is not None:
                joint.unpack(self.factor)
                works[: bucket.index] = [None] * bucket.index
            else:
                if bucket.storage.is_sparse:
                    self._exchange_rows(discards)
                if self._is_logged:
                    self._log_wait(bucket)
                if discards:
                    bucket.storage.discard(bucket)
                else:
                    if self.factor is not None:
                        factor = self.factor if factor is None else self.factor * factor
                    try:
                        bucket.storage.unpack(bucket, factor, flags.get(bucket.index))
                    except Exception:  # out of memory, for example; the other ranks continue
                        self.done = bucket.index + 1
                        self.drain()
                        raise
            self.done = bucket.index + 1
            works[bucket.index] = None
            if joint is None and not discards:
                for call in events.on_reduced:
                    call(self, bucket)
        if self.agreement.pending and not self.is_captured:
            self.agreement.check_pending(but_last=True)

    def _wait_failed(self, bucket: Bucket, error: RuntimeError, discards: bool = False) -> None:
        """Raise ``error``, which the exchange of ``bucket`` raised, with an explanation.

        If user code failed on this rank, first run the collectives that the other ranks run. Then,
        with ``discards``, the error is dropped.
        """
        cause = error.__cause__
        if isinstance(error, ExchangeError) and cause is not None:
            where = f"{self.where}, {error.buckets}"
            raise self.group.explain(where, error.what, cause) from cause
        if not isinstance(error, LocalError):
            raise self.explain(bucket, error) from error
        self._check_headers()
        self._exchange_rows(discards)
        if not discards:
            raise error

    def _check_headers(self) -> None:
        """Check the headers of all ranks in the first bucket, once; see :meth:`Agreement.check`."""
        if self._has_headers:
            return
        headers, agreement = self.buckets[0].flat.headers, self.agreement
        is_on_cpu = headers.is_cpu  # there they equal the expected bytes in most steps
        if not is_on_cpu or string_at(headers.data_ptr(), headers.nbytes) != agreement.expected:
            if self.over_present or self.values.get(self.weights) is not None:
                self.factor = self.weights.factor(agreement, headers, self.over_present)
            agreement.check(headers, self.where, self.is_captured)
        self._has_headers = True  # not set after a mismatch, so they are checked again

    def _exchange_rows(self, discards: bool) -> None:
        """Run the second step of all sparse gradients, once, after waiting for their buffers."""
        if self._has_exchanged:
            return
        buckets = [
            bucket
            for bucket in self.buckets
            if bucket.storage.is_sparse and bucket.index not in self.skipped
        ]
        if not buckets:
            return
        self.agreement.check_pending()  # after a mismatch the announced row counts are invalid
        for bucket in buckets:
            try:
                bucket.exchange.wait(bucket, self.works[bucket.index])
            except RuntimeError as error:
                self._wait_failed(bucket, error, discards)
        if self._has_exchanged:  # by _wait_failed()
            return
        try:
            exchange_rows(buckets, self.group)
            self._has_exchanged = True
        except RuntimeError as error:
            names = listed([name for bucket in buckets for name in bucket.names])
            last = f"s up to {buckets[-1].index}" if len(buckets) > 1 else f" {buckets[0].index}"
            where = f"{self.where}, bucket{last} ({names})"
            raise self.group.explain(where, "exchange of sparse gradients", error) from error

    def _read_flags(self) -> dict[int, Sequence[float]]:
        """Return the used flags that the host needs on a GPU, by bucket, in one copy for all."""
        asking = [
            bucket
            for bucket in self.buckets[self.done :]
            if bucket.storage.wants_flags
            and self.works[bucket.index] is not None
            and not bucket.flat.data.is_cpu
        ]
        if not asking:
            return {}
        for bucket in self.buckets[self.done : asking[-1].index + 1]:
            if (work := self.works[bucket.index]) is not None:
                try:
                    bucket.exchange.wait(bucket, work)
                except RuntimeError as error:
                    self._wait_failed(bucket, error)
        self._check_headers()  # start their copy to the host before the host waits
        flags = read_together([bucket.flat.flags for bucket in asking])
        return {bucket.index: each.tolist() for bucket, each in zip(asking, flags, strict=True)}

    @torch.no_grad()
    def drain(self) -> None:
        """Wait for the launched buckets, and leave ``.grad`` unchanged."""
        self.finish(discards=True)

    def wait_all(self, what: str) -> None:
        """Wait for all collectives in flight, after a mismatch between ranks.

        If the ranks have sent different numbers of buckets, this takes the group's timeout.

        Raises:
            RuntimeError: a collective failed; ``what`` gives the likely reason.
        """
        for bucket, work in zip(self.buckets, self.works, strict=False):
            if work is not None and bucket.index >= self.done:
                try:
                    bucket.exchange.drain(bucket, work)
                except RuntimeError as error:
                    message = f"all-reduce of {bucket.nbytes} bytes ({what})"
                    raise self.explain(bucket, error, message) from error

    @torch.no_grad()
    def reduce_now(self) -> None:
        """Replace ``.grad`` of all parameters by their mean over the ranks.

        For gradients that do not come from a running backward. If a gradient cannot be reduced, all
        collectives run before the error is raised, so that the other ranks do not hang.

        Raises:
            GradientError: a gradient does not fit its parameter.
            RuntimeError, Mismatch: see :meth:`finish`.
        """
        try:
            for bucket in self.buckets:
                self.launch_now(bucket)
        except Exception:
            self.abandon()
            self.drain()
            raise
        self.finish()
        for call in self.events.on_reduced_all:
            call(self)

    @torch.no_grad()
    def ask(self) -> None:
        """Send only the first bucket, for its header. Gradients do not change.

        Communication hooks compare headers after all buckets, so with a hook all buckets are sent.

        Raises:
            RuntimeError, Mismatch: see :meth:`finish`. After a Mismatch, :meth:`abandon` and
                :meth:`drain` run the collectives of the ranks that reduce.
        """
        sent = self.buckets[:1] if self.bucket_set.averages else self.buckets
        self._launch_nan(until=len(sent))
        first = sent[0]
        try:
            first.exchange.wait(first, self.works[0])
        except RuntimeError as error:
            self._wait_failed(first, error, discards=True)
        self._check_headers()
        self.agreement.check_pending()
        for bucket in sent:
            bucket.storage.discard(bucket)

    # Messages

    @property
    def group(self) -> Group:
        """Process group of the reduction."""
        return self.agreement.group

    def explain(
        self, bucket: Bucket, error: BaseException, what: str | None = None
    ) -> RuntimeError:
        """Return the error to raise if a collective of ``bucket`` failed."""
        return self.group.explain(
            f"{self.where}, {bucket.title}",
            what or f"all-reduce of {bucket.nbytes} bytes",
            error,
        )

    def _log_launch(self, bucket: Bucket, is_broken: bool) -> None:
        if self.bucket_set.averages:
            self._log(bucket, "is sent with NaN" if is_broken else "is sent")
        else:
            self._log(
                bucket, "is passed to the communication hook" + ", filled with zeros" * is_broken
            )

    def _log_wait(self, bucket: Bucket) -> None:
        # On a GPU the host continues before the sum is ready.
        here = "is reduced" if bucket.flat.data.is_cpu else "is queued on the device"
        averages = self.bucket_set.averages
        self._log(bucket, here if averages else "has returned from the communication hook")

    def _log(self, bucket: Bucket, what: str) -> None:
        logger.debug("%s, %s: %s, %d bytes", self.where, bucket.title, what, bucket.nbytes)


class Reduces(Protocol):
    """The state that all reductions of one wrapper share: its reducer."""

    parameters: ModuleParameters
    agreement: Agreement
    weights: Weights
    events: Any  # of reductions
    sync: Any  # provides the ``join`` of a new reduction

    def where(self) -> str:
        """This rank and its step, for messages."""


def open_reduction(
    reducer: Reduces,
    bucket_set: BucketSet,
    source: GradSource,
    used: Sequence[bool] | None = None,
    *,
    where: str = "",
    schema: bytes = b"",
    values: Mapping[HeaderField, Any] = _NO_VALUES,
    is_alone: bool = False,
    is_captured: bool = False,
) -> Reduction:
    """Open a reduction. See :class:`Reduction` for the arguments.

    ``used`` says for each parameter whether this rank uses it; with ``None``, the backward that
    begins records it.
    """
    if used is not None:
        bucket_set.use.count(used)
    join, averages = reducer.sync.join, bucket_set.averages and reducer.weights.is_mean
    if join is not None and source is not GradSource.CHANGED:
        join.reduction_begins()
    return Reduction(
        bucket_set=bucket_set,
        buckets=() if is_alone else bucket_set.buckets,
        agreement=reducer.agreement,
        weights=reducer.weights,
        events=reducer.events,
        source=source,
        where=where or reducer.where(),
        values={SCHEMA: schema or reducer.parameters.schema, **values},
        over_present=averages and join is not None and join.mean_over_present,
        packed=[0] * len(bucket_set.segments),
        pending=[0] * len(bucket_set.buckets),
        is_alone=is_alone,
        is_captured=is_captured,
    )
