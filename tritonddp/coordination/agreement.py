"""Headers: what each rank tells the others in a reduction, so that a mismatch is found in time.

A bucket ends with a *trailer*: elements that are summed with the gradients but are not gradients.
In the trailer of the first bucket each rank writes its *header* of a few elements, and zeros into
the headers of the other ranks. The all-reduce of the bucket therefore gives every rank the headers
of all ranks. Each element holds one byte, which is exact in every dtype.

A header is a sequence of *fields*. A field is defined in the file of the feature that needs it.
"""

from __future__ import annotations

import enum
import hashlib
import logging
from collections.abc import Mapping, Sequence
from ctypes import string_at
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tritonddp._device import Readback, is_capturing
from tritonddp.coordination.group import Group, group_backend

logger = logging.getLogger(__name__)


class GradSource(enum.IntEnum):
    """Where the gradients of a reduction come from. ``words`` is the text for errors and logs."""

    words: str

    def __new__(cls, value: int, words: str = "") -> GradSource:
        self = int.__new__(cls, value)
        self._value_, self.words = value, words
        return self

    FORWARD = 0, "the first backward through a forward"
    AGAIN = 1, "another backward through a forward that was already reduced"
    ELSEWHERE = 2, "another backward"  # may match either of the two above
    BROKEN = 3, "a failed backward"
    REQUEST = 4, "reduce_gradients() of accumulated gradients"
    JOINED = 5, "nothing, because it has no more inputs"
    SKIPPED = 6, "nothing, because no backward followed a forward inside join()"
    GIVEN = 7, "gradients of reduce_gradients() or of torch.distributed.autograd"
    CHANGED = 8, "a forward that found changed parameters in the module"

    @property
    def is_backward(self) -> bool:
        """Whether an ordinary backward runs on this rank."""
        return self in (GradSource.FORWARD, GradSource.AGAIN, GradSource.ELSEWHERE)

    @property
    def is_empty(self) -> bool:
        """Whether no backward runs, so that all gradients of this rank count as zero."""
        return self in (GradSource.JOINED, GradSource.SKIPPED)


class Mismatch(Exception):
    """The ranks reduce different gradients.

    ``options``, by name, are values that the ranks then compare too; ``advice`` is the remedy.
    """

    sent: Sent | None = None  # what this rank sent, if headers revealed the mismatch
    where = ""  # this rank and the step, if that step is over

    def __init__(
        self, message: str = "", options: Mapping[str, str] | None = None, advice: str = ""
    ) -> None:
        super().__init__(message)
        self.options, self.advice = options or {}, advice


class Disagreement(Mismatch):
    """Ranks have diverged in their programs; the message names them."""


class Unmatched(Mismatch):
    """Collectives of the ranks do not match, and may never end. The message says why."""


class SchemaMismatch(Mismatch):
    """Ranks reduce different parameters, or call ``backward()`` on different lines.

    The ranks then run further collectives to find the difference.
    """


class HeaderField:
    """One value in the header of each rank. Override the methods that you need.

    Attributes:
        size: bytes of a value.
        default: value of a reduction that does not :meth:`~Reduction.tell` one. It may change
            at any time, even in a signal handler: the next header has the new value.
        is_late: its bytes are written into the bucket at launch, and :meth:`encode` returns
            zeros. Such a field is the last one.
    """

    size = 1
    default: Any = None
    is_late = False

    def encode(self, value: Any) -> bytes:
        """Return the value of this rank in :attr:`size` bytes. By default zeros for ``None``."""
        encoded: bytes = value or bytes(self.size)
        return encoded

    def decode(self, encoded: bytes) -> Any:
        """Return the value of any rank. Raise a ValueError if :meth:`encode` cannot return this."""
        return encoded

    def is_steady(self, value: Any) -> bool:
        """Return True if equal headers with this value need not be checked again."""
        return True

    def check(self, values: Mapping[int, Any], whole: Mapping[int, Any], mine: Any) -> None:
        """Raise a Mismatch if the ranks do not run the same reduction.

        Args:
            values: values by rank.
            whole: values of the ranks whose backward has not failed, and that have inputs.
            mine: value of this rank, not encoded.
        """

    def read(self, values: Mapping[int, Any]) -> None:
        """Use the values, by rank. All ranks call this in the same reduction, if they agree."""


def differ(values: Mapping[int, Any]) -> bool:
    """Return True if any two ranks have different values."""
    return len(set(values.values())) > 1


def in_words(words: Mapping[int, str]) -> str:
    """Describe what each rank does, as a list in words."""
    return "; ".join(f"rank {rank}: {what}" for rank, what in words.items())


class _Schema(HeaderField):
    size = 3

    def check(self, values: Mapping[int, Any], whole: Mapping[int, Any], mine: Any) -> None:
        if differ(values):
            raise SchemaMismatch


class _Source(HeaderField):
    def encode(self, value: GradSource) -> bytes:
        return bytes([value])

    def decode(self, encoded: bytes) -> GradSource:
        return GradSource(encoded[0])

    def check(self, values: Mapping[int, Any], whole: Mapping[int, Any], mine: Any) -> None:
        others = {*whole.values()} - {GradSource.ELSEWHERE}
        if differ(whole) and others not in ({GradSource.FORWARD}, {GradSource.AGAIN}):
            raise Disagreement(
                "the ranks have diverged: "
                f"{in_words({rank: each.words for rank, each in whole.items()})}. All ranks must "
                "run the same reduced backwards. If only some ranks need a backward, run it inside "
                "no_sync()"
            )


# The fields of every header: hash of the trainable parameters, and source of the gradients.
SCHEMA, SOURCE = _Schema(), _Source()


def schema_hash(parts: Sequence[str]) -> bytes:
    """Return three bytes that differ if ``parts`` do, except in one of 16 million cases."""
    return hashlib.sha256("".join(f"{part}\0" for part in parts).encode()).digest()[:3]


class Sent(NamedTuple):
    """The values that this rank sends in its header in one reduction."""

    values: dict[HeaderField, Any]  # values of all fields
    encoded: bytes  # the bytes that it writes into the trailer of the first bucket


class _Pending(NamedTuple):
    """Headers in flight to the host, what this rank sent with them, and the step."""

    readback: Readback
    sent: Sent
    where: str


class Agreement:
    """Writes this rank's header in each reduction, and compares the headers of all ranks.

    Attributes:
        fields: fields of a header, in the order of their checks: :data:`SCHEMA`,
            :data:`SOURCE`, and those of features.
        size: bytes of a header.
        key: the last arguments of :meth:`open`. Equal arguments give an equal header.
        sent: values that this rank sent last.
        expected: bytes of the reduced headers of the last reduction, if all headers were equal
            and all fields are steady: equal bytes need no further check. Else empty.
        pending: on a GPU, headers that are not checked yet, oldest first, since the host does
            not wait for them. The end of the next reduction checks them, after the host has
            submitted all work to the device. All ranks must find a mismatch, or a request to stop,
            at the same place, so no rank checks earlier.
        all_broke_off: in the last reduction the backward of every rank failed. Not set on a GPU.
    """

    def __init__(self, group: Group, fields: Sequence[HeaderField]) -> None:
        self.group, self.fields = group, tuple(fields)
        *places, self.size = accumulate((field.size for field in self.fields), initial=0)
        self._places = dict(zip(self.fields, places, strict=True))
        self._late = sum(field.size for field in self.fields if field.is_late)  # bytes
        self.key: object = None  # arguments that produced ``sent``
        self.sent = Sent({}, b"")
        self.pending: list[_Pending] = []
        self.expected = b""
        self._readbacks: list[Readback] = []  # not in use
        # By field, values of ranks that agree, which no field has read yet.
        self._unread: list[dict[HeaderField, dict[int, Any]]] = []
        self._is_alone = False  # the group exchanges no data; this was logged
        self._has_heard = False  # headers of all ranks have been received
        self.all_broke_off = False

    def open(self, values: dict[HeaderField, Any], defaults: list[Any]) -> None:
        """Create the header of a reduction with these values, which differ from the last ones."""
        self.key = None  # an interrupt below leaves no key without its header
        all_values = {**dict(zip(self.fields, defaults, strict=True)), **values}
        mine = b"".join(field.encode(value) for field, value in all_values.items())
        before, behind = self.group.rank, self.group.size - self.group.rank - 1
        self.sent = Sent(all_values, bytes(before * self.size) + mine + bytes(behind * self.size))
        self.expected = b""
        self.key = dict(values), defaults

    def column(self, headers: Tensor, field: HeaderField) -> Tensor:
        """Return a field in all headers, one byte per element: ``(world_size, field.size)``."""
        return headers.view(-1, self.size).narrow(1, self._places[field], field.size)

    def check(self, headers: Tensor, where: str, is_captured: bool = False) -> None:
        """Check after the first bucket whether all ranks reduce the same gradients.

        On the CPU this is called if the headers differ from :attr:`expected`. On a GPU the host
        does not wait for the headers: :meth:`check_pending` checks them.

        Args:
            headers: headers of all ranks.
            where: this rank and step, for messages.
            is_captured: a CUDA graph is being captured, whose replays the host does not see.

        Raises:
            Mismatch: the ranks reduce different gradients; see :meth:`HeaderField.check`.
        """
        if headers.is_cpu:
            is_steady = self._look(headers, self.sent, where)
            self.expected = string_at(headers.data_ptr(), headers.nbytes) if is_steady else b""
            self._read()
        elif not is_captured:
            if self._unread:
                self._read()
            readback = self._readbacks.pop() if self._readbacks else Readback()
            readback.start(headers)
            self.pending.append(_Pending(readback, self.sent, where))

    def check_pending(self, but_last: bool = False) -> None:
        """Wait for headers that are not checked yet, and check them; raise as :meth:`check` does.

        Headers that fail the check stay queued. With ``but_last``, the headers of the reduction
        that just ended are not checked yet.
        """
        while len(self.pending) > but_last:
            readback, sent, where = self.pending[0]
            is_last = sent is self.sent
            # Fast path: the copy has usually completed, so compare bytes without synchronizing.
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
        if but_last and self._unread:
            self._read()

    def _read(self) -> None:
        """Pass the unread values to the fields, since all ranks are at the same point."""
        for values in self._unread:
            for field in self.fields:
                field.read(values[field])
        self._unread.clear()

    def _look(self, headers: Tensor, sent: Sent, where: str) -> bool:
        """Check the headers on the host. Return True if equal headers need no second check."""
        rank, size = self.group.rank, self.group.size
        found, ranks = headers.tolist(), range(size)
        self.all_broke_off = False
        own, end = [*sent.encoded], (rank + 1) * self.size
        own[end - self._late : end] = found[end - self._late : end]
        # Only this rank's header was received: the backend exchanges no data, as torch's ``fake``
        # backend does by design. By chance, a participating rank has a header of only zeros in one
        # of 16 million cases. A group written in Python may return its input, as torchft's does
        # after an error.
        if (
            size > 1
            and found == own
            and not (self._has_heard and type(self.group.process_group) is dist.ProcessGroup)
        ):
            ranks = range(rank, rank + 1)
            if not self._is_alone:
                self._is_alone = True
                logger.warning(
                    "%s: no data was received from any other rank. This process group (%s) "
                    "exchanges no data, so gradients are not averaged",
                    where,
                    group_backend(self.group.process_group),
                )
        try:
            values = self._decode(found, ranks)
            exempt = GradSource.BROKEN, GradSource.JOINED
            whole = [rank for rank, source in values[SOURCE].items() if source not in exempt]
            for field, each in values.items():
                field.check(each, {rank: each[rank] for rank in whole}, sent.values[field])
        except Mismatch as error:
            error.sent = sent
            raise
        self._unread.append(values)
        if len(ranks) < size:
            return False
        self._has_heard = True
        sources = values[SOURCE]
        broken = [f"rank {each}" for each in ranks if sources[each] is GradSource.BROKEN]
        self.all_broke_off = len(broken) == size
        if broken and sources[rank] is not GradSource.BROKEN:
            logger.warning(
                "%s: the backward of %s failed. Gradients are NaN in this step: discard them on "
                "all ranks",
                where,
                " and ".join(broken),
            )
        return found == found[: self.size] * size and all(
            field.is_steady(value) for field, value in sent.values.items()
        )

    def _decode(
        self, found: Sequence[float], ranks: Sequence[int]
    ) -> dict[HeaderField, dict[int, Any]]:
        """Return the values by field and rank, from the reduced elements of all headers.

        Raises:
            SchemaMismatch: the elements are not headers: another rank has written gradients there.
            Unmatched: the same, in a group whose ranks have exchanged headers before.
        """
        size = self.size
        silent = [f"rank {r}" for r in ranks if not any(found[r * size : (r + 1) * size])]
        what = (
            f"no data was received from {' and '.join(silent)}"
            if silent
            else "the received data contains no headers"
        )
        try:
            content = bytes(map(int, found))
            if [*content] == found and not (silent and self._has_heard):
                rows = {rank: content[rank * size : (rank + 1) * size] for rank in ranks}
                return {
                    field: {r: field.decode(row[at : at + field.size]) for r, row in rows.items()}
                    for field, at in self._places.items()
                }
        except (ValueError, OverflowError):
            pass
        if not self._has_heard:
            raise SchemaMismatch
        raise Unmatched(
            f"{what}. Another collective of the program was matched with this bucket, because the "
            "order of collectives differs between ranks. This happens if layers run collectives in "
            "the backward and some ranks do not use a parameter. Use a separate process group for "
            "your collectives (torch.distributed.new_group), or pass find_unused_parameters=True "
            "as with stock DDP, and restart"
        )
