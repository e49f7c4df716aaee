"""What each rank says of itself in a reduction, so that ranks which disagree find out in time.

Every rank has a few elements of its own in the trailer of the first bucket and writes zeros into
those of the others. The sum over ranks, which reduces the gradients, thus hands every rank the
ballots of all. Each element holds one byte, which is exact in every wire dtype.
"""

from __future__ import annotations

import enum
import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# fp64 weight, 3 and 2 bytes of hashes, 1 byte of what is reduced.
_FORMAT = struct.Struct("<d6B")
BYTES = _FORMAT.size


class Source(enum.IntEnum):
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
        return self in (Source.JOINED, Source.SKIPPED)

    @property
    def words(self) -> str:
        """For errors and logs."""
        return _WORDS[self]


_WORDS = {
    Source.FORWARD: "the first backward through a forward",
    Source.AGAIN: "one more backward through a forward that it has reduced before",
    Source.ELSEWHERE: "another backward",
    Source.BROKEN: "a backward that broke off",
    Source.REQUEST: "reduce_gradients",
    Source.JOINED: "nothing, as it has run out of inputs",
    Source.SKIPPED: "nothing, as no backward has followed a forward inside join()",
    Source.CONTEXT: "a backward of torch.distributed.autograd",
}


@dataclass(frozen=True)
class Ballot:
    """What one rank says.

    Attributes:
        structure: hash of what must be alike on all ranks, see :func:`structure_hash`.
        source: where the gradients come from.
        weight: what they count, ``None`` where the mean is not weighted. A rank that has none to
            offer says 0: it does not know whether the others' are weighted.
        left_out: hash of the buckets that are not sent, see :func:`left_out_hash`.
        over_present: the mean, if it is not weighted, is that of the ranks that have inputs. (Not
            sent: it comes from :class:`tritonddp.features.join_protocol.Attendance`.)
    """

    structure: bytes
    source: Source
    weight: float | None = None
    left_out: bytes = bytes(2)
    over_present: bool = False

    def places(self, rank: int, world_size: int) -> bytes:
        """The elements that ``rank`` writes: its own ballot, and zeros for all others."""
        places = bytearray(BYTES * world_size)
        weight = math.nan if self.weight is None else self.weight
        mine = _FORMAT.pack(weight, *self.structure, *self.left_out, self.source)
        places[rank * BYTES : (rank + 1) * BYTES] = mine
        return bytes(places)


def structure_hash(parts: Sequence[str]) -> bytes:
    """Three bytes that differ if ``parts`` do, save in one of 16 million cases."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.digest()[:3]


def left_out_hash(buckets: Sequence[int]) -> bytes:
    """Two bytes that differ if ``buckets`` do, save in one of 65,000 cases; zeros for none."""
    return structure_hash(list(map(str, buckets)))[:2] if buckets else bytes(2)


def read(ballots: Tensor) -> list[Ballot]:
    """The ballots of all ranks from the reduced elements, in rank order.

    Raises:
        StructureMismatch: they make no sense: another rank has written something else there.
    """
    try:
        content = bytes(map(int, ballots.tolist()))
        return [
            Ballot(
                bytes(parts[:3]),
                Source(parts[5]),
                None if math.isnan(weight) else weight,
                bytes(parts[3:5]),
            )
            for weight, *parts in _FORMAT.iter_unpack(content)
        ]
    except (ValueError, OverflowError):
        raise StructureMismatch from None


def is_alone(ballots: Tensor, places: bytes) -> bool:
    """Whether a rank finds what it has written (:meth:`Ballot.places`), and nothing of the others.

    Then the process group exchanges nothing, which torch's ``fake`` backend does by intention.
    (A rank that takes part never writes zeros alone, but for one hash in 16 million.)
    """
    return len(places) > BYTES and ballots.tolist() == list(places)


def total_weight(ballots: Tensor) -> Tensor:
    """Sum of all weights, fp64, one element on the device of ``ballots``; NaN if one has none."""
    rows = ballots.view(-1, BYTES)[:, :8].to(torch.uint8)
    return rows.reshape(-1).view(torch.float64).sum()


def ranks_with_inputs(ballots: Tensor) -> Tensor:
    """How many have not joined (:attr:`Source.JOINED`): fp64, on the device of ``ballots``."""
    return (ballots.view(-1, BYTES)[:, -1] != Source.JOINED).sum().to(torch.float64)


class Disagreement(Exception):
    """Some ranks are at another place of their program than others; the text names them."""


class OutOfStep(Exception):
    """Some ranks send buckets that others leave out: their collectives match no more."""


class StructureMismatch(Exception):
    """Ranks reduce different sets of parameters. Only the ranks together can tell which."""


def check(ballots: Sequence[Ballot]) -> None:
    """Do the ranks reduce what belongs together?

    Raises:
        StructureMismatch: not the same parameters.
        OutOfStep: not the same buckets of them.
        Disagreement: some ranks are at another place of their program than others.
    """
    if len({ballot.structure for ballot in ballots}) > 1:
        raise StructureMismatch
    if len({ballot.left_out for ballot in ballots}) > 1:
        raise OutOfStep
    whole = {
        rank: each
        for rank, each in enumerate(ballots)
        if each.source not in (Source.BROKEN, Source.JOINED)
    }
    sources = {each.source for each in whole.values()}
    if sources not in ({Source.REQUEST}, {Source.SKIPPED}, {Source.CONTEXT}, set()) and not any(
        sources <= {Source.ELSEWHERE, alike} for alike in (Source.FORWARD, Source.AGAIN)
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


def _by_rank(said: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {what}" for rank, what in said.items())
