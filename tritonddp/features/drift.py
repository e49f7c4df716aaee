"""``check_drift``: do the parameters differ between ranks, and which ones?

The bytes of all parameters in a row are divided into 64 *slices*. In each reduced backward every
rank sends a hash of the next slice, its *report*, beside the gradients. All ranks receive all
reports, so all find a difference in the same step. Then collectives find out which parameters
differ.

The hash is multilinear: the sum of 32-bit words, each times a random 64-bit number, modulo 2^64, of
which the upper bits are sent. Two different slices have the same hash in one case of 2^32 (Lemire
and Kaser, "Strongly universal string hashing is fast", 2014). It takes two operations a word; the
checksum of check_sync(), which tells tensors of few bits apart more surely, takes eleven, and two
to seven times as long: too much for each step.
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
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.agreement import GradSource
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import plain_tensors
from tritonddp.reducer.extension import Extension

# Parts of the row of all parameters, hashed in turn.
SLICES = 64
# Bytes of a report: the number of its slice, from 1, and the upper 7 bytes of the hash.
_NBYTES = 8
_NOTHING = bytes(_NBYTES)  # a report without a hash
# Bytes of a word, and words that are hashed in one launch.
_WORD = 4
_WORDS = 2**18
_SUMS = 2**12  # words in one launch when the hashes of several launches are hashed again

_address = methodcaller("data_ptr")

Named = Sequence[tuple[str, Tensor]]
# Finds the parameters that differ, by collectives: see check_sync.compare_parameters(). Takes names
# and parameters, the ranks, this rank and step, and whether this rank's parameters are compared.
# Returns indices of the parameters that differ, and lines for a message.
Compare = Callable[[Named, Group, str, bool], tuple[Sequence[int], Sequence[str]]]


@dataclass
class _Slice:
    """A range of the bytes of all parameters in a row.

    Attributes:
        params: the parameters that have bytes in it.
        addresses: where these were in memory.
        batches: pieces of the parameters, one list for each launch; views of int32 words where all
            pieces of a batch are whole words, else of bytes.
        is_copied: a piece is a copy: its parameter has gaps in memory or is on another device.
    """

    params: Sequence[Tensor]
    addresses: list[int]
    batches: list[list[Tensor]]
    is_copied: bool


class DriftCheck(Extension):
    """Reports a hash of a slice of the parameters, and raises or warns if the ranks differ.

    Args:
        mode: ``"raise"`` or ``"warn"``.
        group: the ranks.
        parameters: the parameters, which should be alike on all ranks.
        compare: finds out which parameters differ.
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
        # Numbers, from 1, of the slices in the last report sent and in the last ones received.
        self._sent = self._received = 0
        self._readback: Readback | None = None  # copies the last hash of a GPU to the host
        # A slice in which ranks differ, to be compared at the end of the reduction. The tuple has a
        # number for each rank, equal where hashes are equal, -1 without a report.
        self._due: tuple[int, tuple[int, ...]] | None = None
        # Slices whose difference was found before and is not compared again, with such a tuple;
        # None if the slice has not been hashed since then.
        self._known: dict[int, tuple[int, ...] | None] = {}
        self._lay_out()

    # Reports that are sent

    def report(self, reduction: Reduction) -> bytes:
        """The number of a slice and its hash. On a GPU the slice of the report before.

        On a GPU the host does not wait for the hash. If its copy is not there yet, which is rare,
        the report is empty.
        """
        if reduction.is_captured:
            return _NOTHING  # each replay would send the same report
        earlier, readback = self._last, self._readback
        # (A rank that has missed a report continues with the slice of the other ranks.)
        missed = self._sent != self._received
        self._last = (self._received + self._is_late if missed else self._last + 1) % SLICES
        total = self._hash(self._last)
        if not self._is_late:
            self._sent = self._last + 1
            return bytes((self._sent, *total.view(torch.uint8).tolist()[1:]))
        copied = None if readback is None else readback.peek()
        report = _NOTHING
        if copied is not None:
            report = bytes((earlier + 1, *map(int, copied.tolist()[1:])))
        self._sent = report[0]
        if readback is None or copied is None:  # the device may still write to the old copy
            readback = self._readback = Readback()
        readback.start(total.view(torch.uint8).float())
        return report

    @torch.no_grad()
    def _hash(self, number: int) -> Tensor:
        """The hash of slice ``number``: int64 ``(1,)`` on the device of the first parameter."""
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
        while len(sums) > 1:  # hash the hashes of several launches, by other random numbers
            words = torch.cat(sums).view(torch.int32).long()
            parts = words.split(_SUMS)
            sums = [part.mul(keys[_WORDS:][: len(part)]).sum().view(1) for part in parts]
        return sums[0] if sums else torch.zeros(1, dtype=torch.int64, device=self._device)

    def _lay_out(self) -> None:
        """Put all parameters in a row, except added ones that are not synchronised yet."""
        self._seen, self._seen_added = self._parameters.params, self._parameters.added
        self._device = self._seen[0][1].device if self._seen else torch.device("cpu")
        self._is_late = self._device.type == "cuda"  # hashes reach the host one report later
        added = {param for _, param in self._seen_added}
        seen = plain_tensors(each for each in self._seen if each[1] not in added)
        self._named = [each for each in seen if _has_bytes(each[1])]
        sizes = (param.numel() * param.element_size() for _, param in self._named)
        self._ends = list(accumulate(sizes, initial=0))  # byte offsets in the row
        self._slices: dict[int, _Slice] = {}

    def _bounds(self, number: int) -> tuple[int, int]:
        """First and last byte offset of slice ``number`` in the row: whole words."""
        total = self._ends[-1]
        begin, end = (total * each // SLICES // _WORD * _WORD for each in (number, number + 1))
        return begin, total if number + 1 == SLICES else end

    def _inside(self, number: int) -> range:
        """Indices of the parameters that have bytes in slice ``number``."""
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
            ends = ((p.data_ptr(), p.storage_offset(), len(p)) for p in batch)
            if not any(each % _WORD for piece in ends for each in piece):
                batch[:] = [piece.view(torch.int32) for piece in batch]
        return _Slice(params, list(map(_address, params)), batches, is_copied)

    # Reports that are received

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """Compare the hashes. Ranks without a hash, or with another slice, are left out."""
        number = next((report[0] for report in reports if report[0]), 0)
        if not number:
            return
        self._received, number = number, number - 1
        distinct = dict.fromkeys(report for report in reports if report[0] == self._received)
        if len(distinct) == 1:
            self._known.pop(number, None)
            return
        index_of = {report: index for index, report in enumerate(distinct)}
        partition = tuple(index_of.get(report, -1) for report in reports)
        if self._known.get(number, ()) not in (None, partition):
            self._due = number, partition
        else:
            self._known[number] = partition

    def on_end(self, reduction: Reduction) -> None:
        """If hashes differ, find out together with all ranks which parameters do.

        Raises:
            RuntimeError: parameters differ and the mode is ``"raise"``; or the comparison failed.
        """
        # (A rank that has run out of inputs has no step to repeat.)
        if not reduction.is_captured:
            self._tell(reduction, raises=self._mode == "raise" and not reduction.source.is_empty)

    def on_abort(self, reduction: Reduction | None) -> None:
        """The same on a rank whose backward broke off: the comparison is collective."""
        if reduction is not None and reduction.source is GradSource.BROKEN:
            self._tell(reduction, raises=False)

    def _tell(self, reduction: Reduction, raises: bool) -> None:
        message = None if self._due is None else self._differences(reduction)
        if message is not None and raises:
            raise RuntimeError(message)
        if message is not None:
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _differences(self, reduction: Reduction) -> str | None:
        """The message about the parameters that differ; ``None`` if none differs any more."""
        assert self._due is not None
        (number, partition), self._due = self._due, None
        self._lay_out()  # of the present parameters
        counts = not reduction.source.is_empty
        try:
            numbers, lines = self._compare(self._named, self._group, reduction.where, counts)
        except RuntimeError as error:
            if error.__cause__ is not None:  # the comparison itself has failed
                raise
            # The ranks have different parameters: the error on all ranks says so.
            if self._mode == "warn":
                self._known = dict.fromkeys(range(SLICES))
            return str(error)
        if not numbers:  # only the order in memory differed, or the difference is gone
            self._known[number] = partition
            return None
        if self._mode == "warn":
            self._note(numbers)
            self._known[number] = partition
        again = "" if self._mode == "raise" else " The next warning comes when others differ."
        return "\n".join(
            [
                f"{reduction.where}: {len(numbers)} of {len(self._named)} parameters differ "
                "between ranks (check_drift):",
                *lines,
                "Load the last checkpoint on all ranks, or take over the parameters of one rank; "
                f"model.check_sync() compares buffers and gradients too.{again}",
            ]
        )

    def _note(self, numbers: Sequence[int]) -> None:
        """Note, for all slices that contain these parameters, that their difference is known."""
        differing = set(numbers)
        for number in range(SLICES):
            if not differing.isdisjoint(self._inside(number)):
                self._known.setdefault(number, None)


def _has_bytes(param: Tensor) -> bool:
    """Whether the parameter has memory of its own. (Tensor subclasses of other tensors do not.)"""
    if hasattr(param, "__tensor_flatten__") or isinstance(param, UninitializedParameter):
        return False
    is_there = param.layout is torch.strided and param.device.type != "meta"
    return is_there and (param.data_ptr() != 0 or not param.numel())  # 0: its memory was freed


def _bytes_of(param: Tensor) -> Tensor:
    """A view of its bytes in memory order; a copy if it has gaps, a conj or a neg bit."""
    data: Any = param.detach().resolve_conj().resolve_neg()
    order = sorted(range(data.dim()), key=lambda dim: -data.stride(dim))
    return data.permute(order).contiguous().view(-1).view(torch.uint8)


@cache
def _keys(device: torch.device) -> Tensor:
    """Random int64 factors, the same on all ranks, for words and for the hashes of launches."""
    generator = torch.Generator().manual_seed(0x64726966)
    numbers = torch.empty(_WORDS + _SUMS, dtype=torch.int64, device="cpu")
    return numbers.random_(-(2**63), None, generator=generator).to(device)
