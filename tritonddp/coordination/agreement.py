"""What each rank says of itself in a reduction, so that ranks which disagree find out in time.

Every rank has a few elements of its own in the trailer of the first bucket, its *header*, and
writes zeros into those of the others. The sum over ranks, which reduces the gradients, thus hands
every rank the headers of all. Each element holds one byte, which is exact in every wire dtype.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonddp._device import Readback
from tritonddp._torch import group_backend
from tritonddp.coordination.group import Group

logger = logging.getLogger("tritonddp.comm.reduction")

# fp64 weight, 3 and 2 bytes of hashes, 1 byte of what is reduced.
_FORMAT = struct.Struct("<d6B")
BYTES = _FORMAT.size

# Unit of weights in the first weighted reduction, before any is known to all ranks: some samples or
# some thousands of tokens are both within a hundredfold of it, for which fp16 has room.
_FIRST_UNIT = 16.0


class GradSource(enum.IntEnum):
    """Where the gradients of a reduction come from."""

    FORWARD = 0  # the first reduced backward through the outputs of a forward
    AGAIN = 1  # one more backward through outputs that a reduced backward went through before
    ELSEWHERE = 2  # any other backward: it may belong to either of these
    BROKEN = 3  # nowhere: this rank's backward broke off
    REQUEST = 4  # gradients that the user has handed over (reduce_gradients)
    JOINED = 5  # nowhere: this rank has run out of inputs (join)
    SKIPPED = 6  # nowhere: no backward has followed a forward inside join
    CONTEXT = 7  # a backward of torch.distributed.autograd

    @property
    def is_empty(self) -> bool:
        """Whether no backward runs, and all gradients of this rank count as zero."""
        return self in (GradSource.JOINED, GradSource.SKIPPED)

    @property
    def words(self) -> str:
        """For errors and logs."""
        return _WORDS[self]


_WORDS = {
    GradSource.FORWARD: "the first backward through a forward",
    GradSource.AGAIN: "one more backward through a forward that it has reduced before",
    GradSource.ELSEWHERE: "another backward",
    GradSource.BROKEN: "a backward that broke off",
    GradSource.REQUEST: "reduce_gradients",
    GradSource.JOINED: "nothing, as it has run out of inputs",
    GradSource.SKIPPED: "nothing, as no backward has followed a forward inside join()",
    GradSource.CONTEXT: "a backward of torch.distributed.autograd",
}


@dataclass(frozen=True)
class Weight:
    """How much the gradients of a rank count.

    Attributes:
        items: how many items the loss is a mean or a sum of.
        is_sum: the loss is a sum, so that its gradients count as they are.
    """

    items: float
    is_sum: bool = False

    @property
    def scale(self) -> float:
        """By which a rank's gradient is multiplied. A sum over no items is a sum all the same."""
        return 1.0 if self.is_sum and not self.items else self.items


# What gradients count on a rank that has none.
NOTHING = Weight(0.0)


@dataclass(frozen=True)
class RankHeader:
    """What one rank says.

    Attributes:
        schema: hash of what must be alike on all ranks, see :func:`schema_hash`.
        source: where the gradients come from.
        weight: what they count, ``None`` where the mean is not weighted. A rank that has none to
            offer says 0: it does not know whether the others' are weighted.
        skipped: hash of the buckets that are not sent, see :func:`skipped_hash`.
        over_present: the mean, if it is not weighted, is that of the ranks that have inputs. (Not
            sent: the ranks agree on it when a forward inside ``join()`` begins.)
    """

    schema: bytes
    source: GradSource
    weight: float | None = None
    skipped: bytes = bytes(2)
    over_present: bool = False

    def encode(self, rank: int, world_size: int) -> bytes:
        """The elements that ``rank`` writes: its own header, and zeros for all others."""
        encoded = bytearray(BYTES * world_size)
        weight = math.nan if self.weight is None else self.weight
        mine = _FORMAT.pack(weight, *self.schema, *self.skipped, self.source)
        encoded[rank * BYTES : (rank + 1) * BYTES] = mine
        return bytes(encoded)


def schema_hash(parts: Sequence[str]) -> bytes:
    """Three bytes that differ if ``parts`` do, save in one of 16 million cases."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.digest()[:3]


def skipped_hash(buckets: Sequence[int]) -> bytes:
    """Two bytes that differ if ``buckets`` do, save in one of 65,000 cases; zeros for none."""
    return schema_hash(list(map(str, buckets)))[:2] if buckets else bytes(2)


def decode(headers: Tensor) -> list[RankHeader]:
    """The headers of all ranks from the reduced elements, in rank order.

    Raises:
        SchemaMismatch: they make no sense: another rank has written something else there.
    """
    try:
        content = bytes(map(int, headers.tolist()))
        return [
            RankHeader(
                bytes(parts[:3]),
                GradSource(parts[5]),
                None if math.isnan(weight) else weight,
                bytes(parts[3:5]),
            )
            for weight, *parts in _FORMAT.iter_unpack(content)
        ]
    except (ValueError, OverflowError):
        raise SchemaMismatch from None


def is_alone(headers: Tensor, encoded: bytes) -> bool:
    """Whether a rank finds what it has written (:meth:`RankHeader.encode`), and nothing else.

    Then the process group exchanges nothing, which torch's ``fake`` backend does by intention.
    (A rank that takes part never writes zeros alone, but for one hash in 16 million.)
    """
    return len(encoded) > BYTES and headers.tolist() == list(encoded)


def total_weight(headers: Tensor) -> Tensor:
    """Sum of all weights, fp64, one element on the device of ``headers``; NaN if one has none."""
    rows = headers.view(-1, BYTES)[:, :8].to(torch.uint8)
    return rows.reshape(-1).view(torch.float64).sum()


def ranks_with_inputs(headers: Tensor) -> Tensor:
    """How many have not joined (:attr:`GradSource.JOINED`): fp64, on ``headers``' device."""
    return (headers.view(-1, BYTES)[:, -1] != GradSource.JOINED).sum().to(torch.float64)


class Mismatch(Exception):
    """The ranks do not reduce the same."""


class Disagreement(Mismatch):
    """Some ranks are at another place of their program than others; the text names them."""


class SkippedMismatch(Mismatch):
    """Some ranks send buckets that others leave out: their collectives match no more."""


class SchemaMismatch(Mismatch):
    """Ranks reduce different sets of parameters. Only the ranks together can tell which."""


def check(headers: Sequence[RankHeader]) -> None:
    """Do the ranks reduce what belongs together?

    Raises:
        SchemaMismatch: not the same parameters.
        SkippedMismatch: not the same buckets of them.
        Disagreement: some ranks are at another place of their program than others.
    """
    if len({header.schema for header in headers}) > 1:
        raise SchemaMismatch
    if len({header.skipped for header in headers}) > 1:
        raise SkippedMismatch
    whole = {
        rank: each
        for rank, each in enumerate(headers)
        if each.source not in (GradSource.BROKEN, GradSource.JOINED)
    }
    sources = {each.source for each in whole.values()}
    alone: tuple[set[GradSource], ...] = (
        {GradSource.REQUEST},
        {GradSource.SKIPPED},
        {GradSource.CONTEXT},
        set(),
    )
    if sources not in alone and not any(
        sources <= {GradSource.ELSEWHERE, alike} for alike in (GradSource.FORWARD, GradSource.AGAIN)
    ):
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


class Agreement:
    """What this rank says at the beginning of each reduction, and whether all say the same.

    Args:
        group: the ranks.

    Attributes:
        group: likewise.
        header: what this rank says in the reduction that runs, or said in the last one.
        key: the arguments of :meth:`open` then: if they are as last time, so is all that follows.
        encoded: its bytes, for the trailer of the first bucket.
        is_unanimous: all ranks said what this one said, without weights: there is nothing to be
            looked at as long as they do.
        scale: by which gradients are multiplied before the sum: the weight, or 1, over the number
            of ranks unless something else divides by that.
        unit: in which weights are counted, alike on all ranks: about the last ones.
        pending: on a GPU, where the host does not wait for the headers: they are not looked at yet.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.header: RankHeader | None = None
        self.key: object = None
        self.encoded = b""
        self.is_unanimous = False
        self.scale = 1.0 / group.size
        self.unit = _FIRST_UNIT
        self.pending = False
        self._where = ""
        self._all_alike: Tensor | None = None
        self._readback = Readback()
        self._is_alone = False  # the group exchanges nothing, which was said once

    def open(
        self,
        schema: bytes,
        source: GradSource,
        weight: Weight | None,
        skipped: tuple[int, ...],
        over_present: bool,
        averages: bool,
    ) -> None:
        """A reduction begins in which this rank says something else than in the last one.

        Args:
            schema, source, over_present: see :class:`RankHeader`.
            weight: how much the gradients count, ``None`` if the mean is not weighted.
            skipped: indices of the buckets that are not sent.
            averages: gradients are divided by the number of ranks before they are sent.
        """
        self.key = None  # until all that follows from it is there
        items = None if weight is None else weight.items
        header = RankHeader(schema, source, items, skipped_hash(skipped), over_present)
        self.scale = 1.0 if weight is None else weight.scale / self.unit
        if averages:
            self.scale /= self.group.size
        self.header = header
        self.encoded = header.encode(self.group.rank, self.group.size)
        mine = self.encoded[self.group.rank * BYTES :][:BYTES]
        self._all_alike = torch.tensor([*mine] * self.group.size, dtype=torch.float32)
        self.is_unanimous = False
        self.key = schema, source, weight, skipped, over_present, averages

    def read(self, headers: Tensor, where: str) -> Tensor | None:
        """Find out the sum of the weights, and whether the ranks reduce the same.

        Args:
            headers: of all ranks, reduced.
            where: this rank and step, for messages.

        Returns:
            The factor by which the sum over ranks has to be multiplied, fp64 ``(1,)``; ``None``
            for 1.

        Raises:
            SchemaMismatch, SkippedMismatch, Disagreement: see :func:`check`. On a GPU
            :meth:`check_pending` raises it.
        """
        assert self.header is not None
        self._where = where
        factor = self._factor(headers, self.header)
        if headers.device.type == "cpu":
            self._check(headers)
        else:  # the host does not wait for the device here
            self._readback.start(headers)
            self.pending = True
        return factor

    def check_pending(self) -> None:
        """Wait for headers that could not be looked at, and raise what :meth:`read` would have."""
        if self.pending:
            self.pending = False
            self._check(self._readback.wait())

    def _factor(self, headers: Tensor, header: RankHeader) -> Tensor | None:
        size = self.group.size
        factor: Tensor | None = None
        if header.over_present:
            factor = (size / ranks_with_inputs(headers)).view(1)
        if header.weight is None:
            return factor
        total = total_weight(headers).view(1)
        # All weights zero: a mean of nothing, which shall be zero.
        weighted = torch.where(total == 0, total, size * self.unit / total)
        if header.source.is_empty:  # the others may have no weights
            without = torch.ones_like(total) if factor is None else factor
            weighted = torch.where(total.isnan(), without, weighted)
        return weighted

    def _check(self, headers: Tensor) -> None:
        assert self.header is not None
        assert self._all_alike is not None
        if self.header.weight is None and torch.equal(headers.float(), self._all_alike):
            self.is_unanimous = not self.header.over_present
            return
        self.is_unanimous = False
        if is_alone(headers, self.encoded):
            self._note_alone()
            return
        said = decode(headers)
        check(said)
        broken = [rank for rank, each in enumerate(said) if each.source is GradSource.BROKEN]
        if broken and self.header.source is not GradSource.BROKEN:
            logger.warning(
                "%s: the backward of %s broke off: gradients are NaN in this step",
                self._where,
                " and ".join(f"rank {rank}" for rank in broken),
            )
        self.unit = _unit_of([each.weight for each in said if each.weight])

    def _note_alone(self) -> None:
        if not self._is_alone:
            self._is_alone = True
            logger.warning(
                "%s: no other rank has said anything: this process group (%s) exchanges nothing, "
                "and gradients are not averaged",
                self._where,
                group_backend(self.group.process_group),
            )


def _unit_of(weights: Sequence[float]) -> float:
    """A power of two near their mean: divided by it, weights do not overflow a wire of fp16.

    (A power of two rounds nothing.)
    """
    if not weights:
        return _FIRST_UNIT
    return 2.0 ** round(math.log2(sum(weights) / len(weights)))
