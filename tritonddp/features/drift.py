"""``check_drift``: have the parameters of the ranks come apart, and which ones?

In each reduced backward every rank reports a hash of one 64th of the bytes of all parameters,
another one each time. As all ranks hear all reports, all find a difference in the same step. Then
they look for the parameters together, by collectives.

The hash is the multilinear one of words of 32 bits: their sum, each times a random number of 64
bits, modulo 2^64, of which the upper part is told. Whatever else the words are, it is the same in
one case of 2^32 (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from tritonddp._device import Readback
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.agreement import GradSource
from tritonddp.coordination.group import Group
from tritonddp.reducer.extension import Extension

# Of the parameters, each of which is looked at in turn.
SLICES = 64
# Bytes of a report: one for the number of its slice, from 1, and the upper ones of the hash.
_NBYTES = 8
_NOTHING = bytes(_NBYTES)
# Words that are hashed at once, of 4 bytes each.
_WORD = 4
_WORDS = 2**18
_SUMS = 2**12  # and of the hashes of so many, if there are several

_address = methodcaller("data_ptr")

Named = Sequence[tuple[str, Tensor]]
# Of named parameters, the ranks, this rank and step, and whether this rank's count: the numbers of
# those that differ and lines about them. A collective.
Compare = Callable[[Named, Group, str, bool], tuple[Sequence[int], Sequence[str]]]


@dataclass
class _Slice:
    """A range of the bytes of all parameters in a row.

    Attributes:
        params, addresses: whose bytes these are, and where they were.
        batches: of pieces, words where all are whole ones, else bytes; views of the parameters.
        is_copied: they are copies, of parameters with gaps in memory or on another device.
    """

    params: Sequence[Tensor]
    addresses: list[int]
    batches: list[list[Tensor]]
    is_copied: bool


class DriftCheck(Extension):
    """Reports a hash of a slice of the parameters, and tells when those of the ranks differ.

    Args:
        mode: ``"raise"`` or ``"warn"``.
        group, parameters: the ranks, and what they should hold alike.
        compare: finds out which do.
    """

    report_nbytes = _NBYTES

    def __init__(
        self, mode: str, group: Group, parameters: ModuleParameters, compare: Compare
    ) -> None:
        self._mode = mode
        self._group = group
        self._parameters = parameters
        self._compare = compare
        self._last = -1  # the slice that was hashed last
        # Numbers of the slices, from 1, of which this rank has told, and heard, last.
        self._said = self._heard = 0
        self._readback: Readback | None = None  # of the last hash, on a GPU
        # A slice in which ranks differ, and which ranks hold the same.
        self._due: tuple[int, tuple[int, ...]] | None = None
        # Likewise of those that all ranks know; None if that has not been seen yet.
        self._known: dict[int, tuple[int, ...] | None] = {}
        self._lay_out()

    # What is said

    def report(self, run: ReductionRun) -> bytes:
        """The number of a slice and its hash: now, or on a GPU that of the last time.

        There nobody waits: the device is far behind that by now, or this rank says nothing.
        """
        if run.is_captured:
            return _NOTHING  # replays would say it again
        earlier, readback = self._last, self._readback
        # (A rank that has missed a report goes on where the others are.)
        following = self._last + 1 if self._said == self._heard else self._heard + self._is_late
        self._last = following % SLICES
        total = self._hash(self._last)
        if not self._is_late:
            self._said = self._last + 1
            return bytes((self._said, *total.view(torch.uint8).tolist()[1:]))
        came = None if readback is None else readback.peek()
        said = _NOTHING if came is None else bytes((earlier + 1, *map(int, came.tolist()[1:])))
        self._said = said[0]
        if readback is None or came is None:  # the device may still write to the former
            readback = self._readback = Readback()
        readback.start(total.view(torch.uint8).float())
        return said

    @torch.no_grad()
    def _hash(self, number: int) -> Tensor:
        """Of slice ``number``: int64 ``(1,)`` on the device of the first parameter."""
        parameters = self._parameters
        if parameters.params is not self._seen or parameters.added is not self._seen_added:
            self._lay_out()
        found = self._slices.get(number)
        if found is not None and list(map(_address, found.params)) != found.addresses:
            self._lay_out()
            found = None
        if found is None:
            found = self._cut(number)
            if not found.is_copied:
                self._slices[number] = found
        keys, sums = _keys(self._device), []
        for batch in found.batches:
            words = torch.cat(batch).view(torch.int32).long()
            sums.append(words.mul_(keys[: len(words)]).sum().view(1))
        while len(sums) > 1:  # these again, by other numbers
            words = torch.cat(sums).view(torch.int32).long()
            parts = words.split(_SUMS)
            sums = [part.mul(keys[_WORDS:][: len(part)]).sum().view(1) for part in parts]
        return sums[0] if sums else torch.zeros(1, dtype=torch.int64, device=self._device)

    def _lay_out(self) -> None:
        """All parameters in a row, but for those whose values the ranks have not shared yet."""
        self._seen, self._seen_added = self._parameters.params, self._parameters.added
        self._device = self._seen[0][1].device if self._seen else torch.device("cpu")
        self._is_late = self._device.type == "cuda"  # hashes come to the host when they may
        added = {param for _, param in self._seen_added}
        self._named = [
            (name, param) for name, param in self._seen if param not in added and _has_bytes(param)
        ]
        sizes = (param.numel() * param.element_size() for _, param in self._named)
        self._ends = list(accumulate(sizes, initial=0))  # each begins where the one before ends
        self._slices: dict[int, _Slice] = {}

    def _bounds(self, number: int) -> tuple[int, int]:
        """Where slice ``number`` begins and ends in the row, in bytes: a whole number of words."""
        total = self._ends[-1]
        begin, end = (total * each // SLICES // _WORD * _WORD for each in (number, number + 1))
        return begin, total if number + 1 == SLICES else end

    def _inside(self, number: int) -> range:
        """Numbers of the parameters that have bytes in slice ``number``."""
        begin, end = self._bounds(number)
        if begin == end:
            return range(0)
        return range(bisect_right(self._ends, begin) - 1, bisect_right(self._ends, end - 1))

    def _cut(self, number: int) -> _Slice:
        begin, end = self._bounds(number)
        params = [self._named[each][1] for each in self._inside(number)]
        pieces, is_copied = [], False
        for each, param in zip(self._inside(number), params, strict=True):
            row, start = _bytes_of(param), self._ends[each]
            piece = row[max(0, begin - start) : end - start].to(self._device)
            is_copied |= row.data_ptr() != param.data_ptr() or param.device != self._device
            pieces.append(piece)
        if (rest := (begin - end) % _WORD) and params:
            pieces.append(torch.zeros(rest, dtype=torch.uint8, device=self._device))
        batches: list[list[Tensor]] = []
        room = 0
        for piece in pieces:
            while len(piece):
                if not room:
                    batches.append([])
                    room = _WORDS * _WORD
                batches[-1].append(piece[:room])
                room, piece = room - len(batches[-1][-1]), piece[room:]
        for batch in batches:
            places = ((p.data_ptr(), p.storage_offset(), len(p)) for p in batch)
            if not any(each % _WORD for place in places for each in place):
                batch[:] = [piece.view(torch.int32) for piece in batch]
        return _Slice(params, list(map(_address, params)), batches, is_copied)

    # What is heard

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """Do all say the same of the slice? Ranks that say nothing, or of another, do not count."""
        number = next((report[0] for report in reports if report[0]), 0)
        if not number:
            return
        self._heard, number = number, number - 1
        said = dict.fromkeys(report for report in reports if report[0] == self._heard)
        if len(said) == 1:
            self._known.pop(number, None)
            return
        holders = {report: place for place, report in enumerate(said)}
        partition = tuple(holders.get(report, -1) for report in reports)
        if self._known.get(number, ()) not in (None, partition):
            self._due = number, partition
        else:
            self._known[number] = partition

    def on_end(self, run: ReductionRun) -> None:
        """Find out, with all ranks, which parameters differ.

        Raises:
            RuntimeError: some do, if that is the mode; or the comparison failed.
        """
        if self._due is None or run.is_captured:
            return
        message = self._differences(run)
        if message is None:
            return
        # (A rank that has run out of inputs has nothing to repeat.)
        if self._mode == "raise" and not run.source.is_empty:
            raise RuntimeError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def on_abort(self, run: ReductionRun) -> None:
        """Likewise on a rank whose backward broke off, once its collectives are made."""
        if self._due is not None and run.source is GradSource.BROKEN:
            message = self._differences(run)
            if message is not None:
                warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _differences(self, run: ReductionRun) -> str | None:
        """Which parameters differ, in words; ``None`` if they do not any more."""
        assert self._due is not None
        (number, partition), self._due = self._due, None
        self._lay_out()  # as the ranks hold them now
        counts = not run.source.is_empty
        try:
            numbers, lines = self._compare(self._named, self._group, run.where, counts)
        except RuntimeError as error:
            if error.__cause__ is not None:  # the comparison itself has failed
                raise
            # The ranks do not even have the same parameters: all of them are told so.
            if self._mode == "warn":
                self._known = dict.fromkeys(range(SLICES))
            return str(error)
        if not numbers:  # it was another order in memory, or has passed
            self._known[number] = partition
            return None
        if self._mode == "warn":
            self._note(numbers)
            self._known[number] = partition
        again = "" if self._mode == "raise" else " It is said again when others differ."
        return "\n".join(
            [
                f"{run.where}: the parameters of the ranks have come apart (check_drift), "
                f"{len(numbers)} of {len(self._named)}:",
                *lines,
                "Load the last checkpoint on all ranks, or take over the parameters of one rank; "
                f"model.check_sync() compares buffers and gradients too.{again}",
            ]
        )

    def _note(self, numbers: Sequence[int]) -> None:
        """All ranks know that these parameters differ, in whichever of their slices."""
        differing = set(numbers)
        for number in range(SLICES):
            if not differing.isdisjoint(self._inside(number)):
                self._known.setdefault(number, None)


def _has_bytes(param: Tensor) -> bool:
    """Whether it is in memory as it is. (Not so what consists of other tensors.)"""
    if hasattr(param, "__tensor_flatten__") or isinstance(param, UninitializedParameter):
        return False
    is_there = param.layout is torch.strided and param.device.type != "meta"
    return is_there and (param.data_ptr() != 0 or not param.numel())  # or it was freed


def _bytes_of(param: Tensor) -> Tensor:
    """A view of its bytes, in the order of memory; a copy if there are gaps or signs to resolve."""
    data: Any = param.detach().resolve_conj().resolve_neg()
    order = sorted(range(data.dim()), key=lambda dim: -data.stride(dim))
    return data.permute(order).contiguous().view(-1).view(torch.uint8)


@cache
def _keys(device: torch.device) -> Tensor:
    """Random numbers, the same on all ranks: int64, for words and for their sums."""
    generator = torch.Generator().manual_seed(0x64726966)
    numbers = torch.empty(_WORDS + _SUMS, dtype=torch.int64, device="cpu")
    return numbers.random_(-(2**63), None, generator=generator).to(device)
