"""Headers: what each rank tells the others in a reduction, so that a mismatch is found in time.

A bucket ends with a *trailer*: elements that are summed with the gradients but are none. In the
trailer of the first bucket each rank has a few elements of its own, its *header*, and writes zeros
into the headers of the other ranks. The all-reduce of the bucket therefore gives every rank the
headers of all ranks. Each element holds one byte, which is exact in every dtype.

By one bit of its header a rank asks all ranks to stop after the same reduction.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
import struct
from collections.abc import Sequence
from ctypes import string_at
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._device import Readback, is_capturing
from tritonddp.coordination.group import Group, group_backend

logger = logging.getLogger(__name__)

# fp64 weight, NaN without one; hashes of the schema, of the call site, of the skipped buckets;
# whether the rank asks all to stop; source.
_FORMAT = struct.Struct("<d3s3s2sBB")
BYTES = _FORMAT.size

# Unit of weights in the first weighted reduction, when no weight is known to all ranks yet. A few
# samples and some thousands of tokens both differ from it by a factor of 100 at most, and fp16 has
# range enough for that.
_FIRST_UNIT = 16.0


class GradSource(enum.IntEnum):
    """Where the gradients of a reduction come from. ``words`` are for errors and logs."""

    words: str

    def __new__(cls, value: int, words: str = "") -> GradSource:
        self = int.__new__(cls, value)
        self._value_, self.words = value, words
        return self

    FORWARD = 0, "the first backward through a forward"
    AGAIN = 1, "one more backward through a forward that it has reduced before"
    ELSEWHERE = 2, "another backward"  # it may belong to either of these
    BROKEN = 3, "a backward that broke off"
    REQUEST = 4, "reduce_gradients() of accumulated gradients"
    JOINED = 5, "nothing, as it has run out of inputs"
    SKIPPED = 6, "nothing, as no backward has followed a forward inside join()"
    GIVEN = 7, "gradients of reduce_gradients() or of torch.distributed.autograd"
    CHANGED = 8, "a forward that finds other parameters in the module"

    @property
    def is_backward(self) -> bool:
        """Whether an ordinary backward runs on this rank."""
        return self in (GradSource.FORWARD, GradSource.AGAIN, GradSource.ELSEWHERE)

    @property
    def is_empty(self) -> bool:
        """Whether no backward runs, and all gradients of this rank count as zero."""
        return self in (GradSource.JOINED, GradSource.SKIPPED)


@dataclass(frozen=True)
class Weight:
    """How much the gradients of a rank count."""

    items: float  # how many items the loss is a mean or a sum of
    is_sum: bool = False  # the loss is a sum, so that its gradients count as they are

    @property
    def scale(self) -> float:
        """Factor of this rank's gradients. A sum over no items keeps its gradients: 1."""
        return 1.0 if self.is_sum and not self.items else self.items


# The weight of a rank without gradients.
NOTHING = Weight(0.0)


@dataclass(frozen=True)
class RankHeader:
    """The header of one rank.

    Attributes:
        weight: their weight; ``None`` where the mean is not weighted. A rank without gradients
            sends 0: it does not know whether the other ranks weight theirs.
        call_site: of a module that is replicated in place: hash of the place that has called the
            backward, 3 bytes. Else zeros.
    """

    schema: bytes  # hash of the trainable parameters, alike on all ranks, see schema_hash()
    source: GradSource  # where the gradients come from
    weight: float | None = None
    skipped: bytes = bytes(2)  # hash of the buckets that are not sent, see skipped_hash()
    stops: bool = False  # it asks all ranks to stop
    call_site: bytes = bytes(3)

    @classmethod
    def decode(cls, header: bytes) -> RankHeader:
        """The header of which these are the bytes; a ValueError if there is no such header."""
        weight, schema, site, skipped, stops, source = _FORMAT.unpack(header)
        if stops > 1:
            raise ValueError
        number = None if math.isnan(weight) else weight
        return cls(schema, GradSource(source), number, skipped, bool(stops), site)

    def encode(self, rank: int, world_size: int) -> bytes:
        """The elements that ``rank`` writes: its own header, and zeros for all other ranks."""
        weight = math.nan if self.weight is None else self.weight
        flags = self.stops, self.source
        mine = _FORMAT.pack(weight, self.schema, self.call_site, self.skipped, *flags)
        return bytes(rank * BYTES) + mine + bytes((world_size - rank - 1) * BYTES)


def schema_hash(parts: Sequence[str]) -> bytes:
    """Three bytes that differ if ``parts`` do, save in one of 16 million cases."""
    return hashlib.sha256("".join(f"{part}\0" for part in parts).encode()).digest()[:3]


def skipped_hash(buckets: Sequence[int]) -> bytes:
    """Two bytes that differ if ``buckets`` do, save in one of 65,000 cases; zeros for none."""
    return schema_hash(list(map(str, buckets)))[:2] if buckets else bytes(2)


def decode(headers: Tensor) -> list[RankHeader]:
    """The headers of all ranks from the reduced elements, in rank order.

    Raises:
        SchemaMismatch: the elements are no headers: another rank has written gradients there.
    """
    elements = headers.tolist()
    try:
        content = bytes(map(int, elements))
        if [*content] != elements:
            raise SchemaMismatch
        return [RankHeader.decode(content[i : i + BYTES]) for i in range(0, len(content), BYTES)]
    except (ValueError, OverflowError):
        raise SchemaMismatch from None


def total_weight(headers: Tensor) -> Tensor:
    """Sum of all weights: fp64, one element, on the device of ``headers``.

    NaN if a rank has no weight.
    """
    rows = headers.view(-1, BYTES)
    return rows[:, :8].to(torch.uint8).reshape(-1).view(torch.float64).sum()


class Mismatch(Exception):
    """The ranks do not reduce the same."""

    sent: Sent | None = None  # what this rank has sent, if that was found in headers
    where = ""  # this rank and the step, if that is over


class Disagreement(Mismatch):
    """Ranks are at different places of their programs; the message names them."""


class Displaced(Mismatch):
    """Another collective ran in the place of the first bucket; the message says what came."""


class SkippedMismatch(Mismatch):
    """Some ranks skip buckets that others send: their collectives do not match any more."""


class SchemaMismatch(Mismatch):
    """Ranks reduce different parameters, or in other places. Collectives find out which."""


def check(headers: Sequence[RankHeader]) -> None:
    """Check that all ranks make the same reduction.

    Raises:
        SchemaMismatch: they reduce different parameters, or are called in different places.
        SkippedMismatch: they skip different buckets.
        Disagreement: they are at different places of their programs.
    """
    if len({header.schema for header in headers}) > 1:
        raise SchemaMismatch
    if len({header.skipped for header in headers}) > 1:
        raise SkippedMismatch
    exempt = (GradSource.BROKEN, GradSource.JOINED)
    whole = {rank: each for rank, each in enumerate(headers) if each.source not in exempt}
    if len({each.call_site for each in whole.values()}) > 1:
        raise SchemaMismatch
    sources = {each.source for each in whole.values()}
    pairs = ({GradSource.ELSEWHERE, GradSource.FORWARD}, {GradSource.ELSEWHERE, GradSource.AGAIN})
    if len(sources) > 1 and sources not in pairs:
        raise Disagreement(
            "the ranks are at different places of their programs: "
            f"{_by_rank({rank: each.source.words for rank, each in whole.items()})}. Every rank "
            "must make the same reduced backwards: put those that only some ranks make under "
            "no_sync()"
        )
    if len({each.weight is None for each in whole.values()}) > 1:
        weights = {
            rank: "no weight" if each.weight is None else f"weight {each.weight:g}"
            for rank, each in whole.items()
        }
        raise Disagreement(
            f"the mean is weighted on some ranks only: {_by_rank(weights)}. Run the backward "
            "inside weighted(n) on every rank or on none"
        )


def _by_rank(words: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {what}" for rank, what in words.items())


class Sent(NamedTuple):
    """What this rank tells the others in a reduction."""

    header: RankHeader  # of this rank
    encoded: bytes  # the bytes that it writes into the trailer of the first bucket
    skipped: Sequence[int]  # indices of the buckets that are not sent
    over_present: bool  # see open()


class _Pending(NamedTuple):
    """Headers on their way to the host, what was sent with them, and in which step."""

    readback: Readback
    sent: Sent
    where: str


class Agreement:
    """Writes this rank's header in each reduction, and compares the headers of all ranks.

    Attributes:
        key: the last arguments of :meth:`open`. With the same arguments the header is the same.
        divisor: what the sum is divided by: the number of ranks, or a number of the user's, which
            then is that of a mean over the ranks with inputs too.
        scale: factor of the gradients before the sum: the weight (else 1), divided by
            :attr:`divisor` unless that is divided by later.
        unit: weights are divided by it before the sum: near the last weights that all ranks know.
        expected: bytes of the reduced headers of the last reduction, if all headers were equal, and
            had no weights: while they stay so, the host need not look at them. Else empty.
        pending: on a GPU: headers that are not checked yet, oldest first, as the host does not wait
            for them. The end of the next reduction checks them, once it has given the device all
            its work. (All ranks have to find a mismatch, or a request to stop, at the same place,
            so no rank looks earlier.)
        all_broke_off: in the last reduction the backward of every rank broke off. (Not on a GPU.)
        is_stopped: a rank has asked all to stop, in a reduction that is over. On a GPU: in the one
            before, whose headers each rank has read by then.
    """

    def __init__(self, group: Group, divide_factor: float | None = None) -> None:
        self.group = group
        self.divisor = group.size if divide_factor is None else divide_factor
        self._is_mean = divide_factor is None
        self.key: object = None  # which has led to:
        self.sent = Sent(RankHeader(bytes(3), GradSource.BROKEN), b"", (), False)
        self.scale = 1.0 / self.divisor
        self.unit = self._next_unit = _FIRST_UNIT
        self.pending: list[_Pending] = []
        self.expected = b""
        self._readbacks: list[Readback] = []  # not in use
        self._is_alone = False  # the group exchanges nothing; this was logged
        self._has_heard = False  # headers of all ranks have come
        self.is_stopped = False
        self._asked_at = -1  # number of reductions when this rank asked all to stop
        self._has_stop = False  # headers that were read had such a request
        self.all_broke_off = False

    def open(
        self,
        schema: bytes,
        source: GradSource,
        weight: Weight | None,
        skipped: tuple[int, ...],
        over_present: bool,
        averages: bool,
        call_site: bytes,
    ) -> None:
        """A reduction begins whose header differs from the last one: make it.

        Args:
            schema, source, call_site: see :class:`RankHeader`.
            weight: the weight of the gradients, ``None`` if the mean is not weighted.
            skipped: indices of the buckets that are not sent.
            over_present: a mean without weights is that over the ranks that still have inputs.
                (Not sent: the ranks agree on it when a forward inside ``join()`` begins.)
            averages: gradients are divided by :attr:`divisor` before they are sent.
        """
        self.key = None  # an interrupt below leaves no key without its header
        asked_at = self._asked_at  # once: a signal handler may ask while this runs
        stops = asked_at >= 0 and not self._has_stop
        items = None if weight is None else weight.items
        header = RankHeader(schema, source, items, skipped_hash(skipped), stops, call_site)
        self.scale = 1.0 if weight is None else weight.scale / self.unit
        if averages:
            self.scale /= self.divisor
        encoded = header.encode(self.group.rank, self.group.size)
        self.sent = Sent(header, encoded, skipped, over_present and self._is_mean)
        self.expected = b""
        self.key = schema, source, weight, skipped, over_present, averages, call_site
        if self._asked_at != asked_at:
            self.key = None  # it was asked for after that: the next header has it

    def check(self, headers: Tensor, where: str, is_captured: bool = False) -> Tensor | None:
        """The first bucket is reduced: find out whether all ranks reduce the same.

        On the CPU this is called where the headers are not those :attr:`expected`. On a GPU the
        host does not wait for them: :meth:`check_pending` looks at them.

        Args:
            headers: those of all ranks.
            where: this rank and step, for messages.
            is_captured: a CUDA graph is captured, whose replays the host does not see.

        Returns:
            The factor by which the sum over ranks has to be multiplied, fp64 ``(1,)``; ``None``
            for 1.

        Raises:
            Mismatch: see :func:`check`.
        """
        sent, is_on_cpu = self.sent, headers.is_cpu
        is_scaled = sent.over_present or sent.header.weight is not None
        factor = self._factor(headers, sent) if is_scaled else None
        if is_on_cpu:
            is_steady = self._look(headers, sent, where)
            self.expected = string_at(headers.data_ptr(), headers.nbytes) if is_steady else b""
            self.is_stopped, self.unit = self._has_stop, self._next_unit
        elif not is_captured:
            self.is_stopped, self.unit = self._has_stop, self._next_unit
            readback = self._readbacks.pop() if self._readbacks else Readback()
            readback.start(headers)
            self.pending.append(_Pending(readback, sent, where))
        return factor

    def _factor(self, headers: Tensor, sent: Sent) -> Tensor:
        """The factor of a mean that is weighted, or over the ranks with inputs."""
        size, factor = self.group.size, None
        if sent.over_present:
            have_inputs = headers.view(-1, BYTES)[:, BYTES - 1] != GradSource.JOINED
            factor = (size / have_inputs.sum().to(torch.float64)).view(1)
        if sent.header.weight is None:
            assert factor is not None, "it is neither weighted nor over some ranks"
            return factor
        total = total_weight(headers).view(1)
        # If all weights are zero, the mean shall be zero.
        weighted = torch.where(total == 0, total, size * self.unit / total)
        if sent.header.source.is_empty:  # the other ranks may use no weights
            factor = torch.ones_like(total) if factor is None else factor
            weighted = torch.where(total.isnan(), factor, weighted)
        return weighted

    def check_pending(self, but_last: bool = False) -> None:
        """Wait for headers that are not checked yet, and check them: raises as :meth:`check`.

        What raises stays pending. With ``but_last``, at the end of a reduction of all ranks, those
        of that are left out.
        """
        while len(self.pending) > but_last:
            readback, sent, where = self.pending[0]
            is_last = sent is self.sent
            # (In the usual case the device is that far, and the host does not ask it.)
            if not (is_last and string_at(*readback.memory) == self.expected):
                headers = readback.peek() if is_capturing() else readback.wait()
                if headers is None:
                    return
                try:
                    is_steady = self._look(headers, sent, where) and is_last
                except Mismatch as error:
                    error.where = where
                    raise
                self.expected = string_at(*readback.memory) if is_steady else b""
            del self.pending[0]
            self._readbacks.append(readback)
        if but_last:
            self.is_stopped, self.unit = self._has_stop, self._next_unit

    def request_stop(self, reductions: int) -> None:
        """Ask all ranks to stop, in the next header that is made: so many reductions have begun.

        A signal handler may call it, and any thread: it takes no lock, and a request that comes
        while :meth:`open` runs is not lost.
        """
        if self._asked_at < 0:
            self._asked_at = reductions
            self.key = None  # after that: see the end of open()

    def should_stop(self, reductions: int) -> bool:
        """See :attr:`is_stopped`. A rank alone, which may send no header, has reduced since."""
        if self.is_stopped:
            return True
        return self.group.size == 1 and 0 <= self._asked_at < reductions

    @property
    def wants_stop(self) -> bool:
        """Whether this rank has asked all to stop, or knows that one has."""
        return self._asked_at >= 0 or self._has_stop

    def set_unit(self, unit: float) -> None:
        """Go on with the :attr:`unit` of an earlier run."""
        self.unit = self._next_unit = unit

    def _look(self, headers: Tensor, sent: Sent, where: str) -> bool:
        """On the host: check the headers. Returns whether the same ones need no second look."""
        header, found = sent.header, headers.tolist()
        rank, size = self.group.rank, self.group.size
        mine = sent.encoded[rank * BYTES :][:BYTES]
        self.all_broke_off = False
        if header.weight is None and found == [*mine] * size:
            self._has_heard = True
            self.all_broke_off = header.source is GradSource.BROKEN
            if header.stops:
                self._stop_is_asked(range(size))
            return not (sent.over_present or header.stops)
        # Only this rank's own header has arrived: the backend exchanges nothing, as torch's
        # ``fake`` backend does by design. (The header of a rank that takes part is all zeros in one
        # case of 16 million.)
        is_alone = size > 1 and found == [*sent.encoded]
        # (A group written in Python may give back what it got, as torchft's after an error.)
        if is_alone and not (
            self._has_heard and type(self.group.process_group) is dist.ProcessGroup
        ):
            if not self._is_alone:
                self._is_alone = True
                logger.warning(
                    "%s: nothing came from any other rank: this process group (%s) exchanges "
                    "no data, and gradients are not averaged",
                    where,
                    group_backend(self.group.process_group),
                )
            if header.stops:
                self._stop_is_asked([rank])
            return False
        try:
            decoded = self._decode_heard(headers) if self._has_heard else decode(headers)
            check(decoded)
        except Mismatch as error:
            error.sent = sent
            raise
        self._has_heard = True
        if asking := [rank for rank, each in enumerate(decoded) if each.stops]:
            self._stop_is_asked(asking)
        broken = [f"rank {rank}" for rank, h in enumerate(decoded) if h.source is GradSource.BROKEN]
        if broken and header.source is not GradSource.BROKEN:
            logger.warning(
                "%s: the backward of %s broke off: gradients are NaN in this step",
                where,
                " and ".join(broken),
            )
        # A power of two near the mean of the weights: to divide by it does not round, and the
        # quotients do not overflow where gradients travel in fp16.
        weights = [each.weight for each in decoded if each.weight]
        mean = sum(weights) / len(weights) if weights else _FIRST_UNIT
        self._next_unit = 2.0 ** round(math.log2(mean))
        return False

    def _decode_heard(self, headers: Tensor) -> list[RankHeader]:
        """See :func:`decode`, in a group whose ranks have exchanged headers before."""
        rows = headers.view(-1, BYTES).tolist()
        if silent := [f"rank {rank}" for rank, row in enumerate(rows) if not any(row)]:
            raise Displaced(f"nothing came from {' and '.join(silent)}")
        try:
            return decode(headers)
        except SchemaMismatch:
            raise Displaced("what came holds no headers") from None

    def _stop_is_asked(self, ranks: Sequence[int]) -> None:
        """These ranks ask all to stop, by the headers of a reduction that all ranks make."""
        if not self._has_stop:
            logger.info(
                "rank %d: asked by %s, all ranks stop after the same reduction",
                self.group.rank,
                " and ".join(f"rank {rank}" for rank in ranks),
            )
        self._has_stop = True
        self.key = None  # the next header is without the request
