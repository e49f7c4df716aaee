"""Module buffers: all ranks get those of rank 0, and only buffers that change are sent.

In stock DDP a forward broadcasts all buffers, and waits for it. Here a buffer that no forward
changes on any rank is *constant*: it is not sent any more. And where each step has exactly one
forward that synchronises, the changing buffers are sent when the reduced backward before it has
ended, while the optimizer runs::

    end of backward   on_all_ended    rank 0 copies its buffers, and the broadcast begins
    next forward      synchronise     waits for it, and writes the result into the buffers

In each reduction each rank sends a *report*, a few bytes beside the gradients. What is sent when
follows from the reports of all ranks, and so is the same on all of them:

    state             what is sent, and when              when the ranks are in this state
    learning          all buffers, in the forward         until STEPS reductions had no surprise
    constants known   changing ones, in the forward       on a GPU, or with several forwards a step
    ahead             changing ones, after the backward   on the CPU, with one forward a step

A rank whose forward changes a constant reports it in its backward, and the next forward broadcasts
all buffers. So does each forward that is not the first one after a reduction. A change outside of
forwards is noticed one forward late.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, is_

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._device import is_capturing
from tritonddp._torch import preserve_version_counters
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.broadcast import (
    Message,
    Messages,
    StateBroadcast,
    Transfer,
    bytes_of,
    is_averaged,
    joined,
)
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.reducer.extension import Extension, SyncState

logger = logging.getLogger("tritonddp.buffers")

BROADCAST, MEAN, OFF = "broadcast", "mean", "off"
MODES = (BROADCAST, MEAN, OFF)

# After so many reduced backwards in a row without a surprise the learning ends.
STEPS = 16

# Flags of a report.
_SAID = 1  # this is a report
_CHANGED = 2  # the changing buffers are not what all ranks had after the last synchronisation
_BESIDE = 4  # a buffer has changed between the end of a backward and the next forward
_MISSED = 8  # and another rank may have run that forward with the old value
_NEW = 16  # a constant has changed
_OTHER = 32  # there are other buffers, or buffers of other shapes
_NOT_ONE = 64  # not exactly one forward has synchronised buffers since the last reduction
_DURING = 128  # a buffer has changed in the backward, after the report about it was made

# Words of 8 bytes, of all constants, whose bytes are compared in one step.
_WORDS = 1 << 14

_dtype = attrgetter("dtype")
_version = attrgetter("_version")
_Named = Sequence[tuple[str, Tensor]]


class BufferSync(Extension):
    """Synchronises the buffers of one wrapper, as the module's docstring describes.

    Args:
        parameters: has the buffers.
        group: the ranks.
        broadcast: sends buffers in a forward.
        sync: tells whether ``join()`` is under way.
        mode: one of ``MODES``.

    Attributes:
        is_first: no forward has run since the last reduction.
    """

    def __init__(
        self,
        parameters: ModuleParameters,
        group: Group,
        broadcast: StateBroadcast,
        sync: SyncState,
        mode: str,
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._broadcast = broadcast
        self._sync = sync
        self._averages = mode == MEAN
        reports = mode != OFF and group.size > 1 and bool(parameters.buffers())
        self.report_nbytes = 4 if reports else 0
        self.is_first = False
        # On a GPU the host reads reports too late to decide at the end of the same reduction.
        self._on_cpu = all(param.is_cpu for _, param in parameters.params)
        self._messages = Messages(), Messages()  # of all that is sent; of what is not averaged
        # State that is alike on all ranks: it follows from reports and from synchronising forwards.
        self._steps = 0  # reductions in a row without a surprise
        self._steps_of_one = 0  # reductions in a row with exactly one synchronising forward
        self._is_due = False  # in the next forward the ranks agree on which buffers change
        self._gave_up = False  # broadcast all buffers from now on, as stock DDP
        self._changing: list[int] | None = None  # indices of changing buffers, once known
        self._averaged: set[int] = set()  # indices of buffers that are averaged while learning
        self._changes_in_backward = False  # send changing buffers even if reports show no change
        # At the end of this reduction: True: send changing buffers ahead; False: all ranks have the
        # same, nothing to send; None: the next forward sends them.
        self._sends: bool | None = None
        self._pending: _Pending | None = None  # what was sent ahead, for the next forward
        # State of this rank alone.
        self._layout: _Layout | None = None
        self._before: list[Tensor] | None = None  # copies of the bytes when learning began
        self._versions: list[int] = []  # versions of the buffers at that time
        self._constants: _Constants | None = None
        self._alike: list[Tensor] | None = None  # the last values of changing buffers on all ranks
        self._at_end: tuple[list[int], list[int]] | None = None  # ids and versions of buffers
        self._at_report: tuple[list[int], list[int]] | None = None
        self._syncs = 0  # forwards that have synchronised since the last reduction
        self._flags = 0  # of the next report
        self._missed: set[str] = set()  # names of buffers for the flag _MISSED
        self._count = 0

    # At a forward

    def synchronise(self, place: str) -> None:
        """Give all ranks the same buffers; ``place`` is this rank's step, for errors.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        named = self._parameters.buffers()
        if not named:
            return
        in_join = self._sync.join is not None
        if in_join or (named[0][1].is_cuda and is_capturing()):
            # Inside join() the source rank may change; and a replay of a graph makes no reports.
            self.reset()
        if in_join or not (self.report_nbytes or self._averages):
            self._send(named, place)
            return
        self._syncs += 1
        is_first = self.is_first
        if is_first:
            self._look_back(named)
        if self._layout is None or not self._layout.is_of(named):
            self.reset()  # all ranks do so, as they all must send the same buffers
            self._averaged.clear()
            self._layout = _Layout(named)
        if self._pending is not None:
            self._take(named, self._pending, place)
            self._pending = None
        elif self._changing is None:
            self._learn(named, place)
        elif not is_first:
            # Which buffers the earlier forwards of this step have changed is not known.
            self._send_all(named, place, self._changing if self._averages else ())
            self._alike = None
        elif self._changing:
            self._send(self._traveling(named), place, self._averages)
            self._alike = None

    def pass_by(self) -> None:
        """A forward runs that does not synchronise: values sent ahead are outdated then."""
        self._look_back(self._parameters.buffers())
        self._pending = self._alike = None

    def reset(self) -> None:
        """Go back to the state *learning*. All ranks must do so in the same step."""
        self._pending = self._before = self._constants = self._alike = self._changing = None
        self._steps = self._steps_of_one = 0
        self._is_due, self._sends = False, None

    def _traveling(self, named: _Named) -> _Named:
        return [named[index] for index in self._changing or ()]

    def _look_back(self, named: _Named) -> None:
        """Note whether a buffer has changed since the end of the last reduction."""
        self.is_first = False
        if self._at_end != _identities(named):
            self._flags |= _BESIDE
        if self._constants is not None and self._layout is not None and self._layout.is_of(named):
            self._miss(self._constants.changed(named))

    def _miss(self, names: Collection[str]) -> None:
        if names:
            self._flags |= _BESIDE | _MISSED
            self._missed.update(names)

    def _send(self, named: _Named, place: str, averages: bool = False) -> None:
        """Synchronise these buffers, and wait for it."""
        names, buffers = zip(*named, strict=True)
        with preserve_version_counters(buffers):
            if not averages:
                self._broadcast.send(buffers, place, f"buffers ({listed(names)})", again=True)
                return
            with self._guard(f"rank {self._group.rank}, {place}", named), torch.no_grad():
                pending = self._begin(buffers)
                pending.transfer.wait()
            pending.transfer.write(self._views(buffers)[1], buffers)

    def _send_all(self, named: _Named, place: str, averaged: Collection[int]) -> None:
        if averaged:
            self._send([named[index] for index in sorted(averaged)], place, averages=True)
        rest = [each for index, each in enumerate(named) if index not in averaged]
        if rest:
            self._send(rest, place)

    @contextmanager
    def _guard(self, where: str, named: _Named) -> Iterator[None]:
        """Context for collectives of these buffers: an error names the missing rank."""
        try:
            yield
        except RuntimeError as error:
            names, nbytes = [name for name, _ in named], sum(each.nbytes for _, each in named)
            what = "mean" if self._averages else "broadcast"
            what += f" of {len(names)} buffers ({listed(names)}), {nbytes} bytes"
            raise self._group.explain(where, what, error) from error

    def _views(self, tensors: Sequence[Tensor]) -> tuple[list[Message], list[Message]]:
        """Messages of the bytes of all ``tensors``, and of those that are not averaged."""
        most, (every, rest) = self._broadcast.max_bytes, self._messages
        messages = every.of(tensors, most)
        if not self._averages:
            return messages, messages
        return messages, rest.of([each for each in tensors if not is_averaged(each)], most)

    def _begin(self, tensors: Sequence[Tensor]) -> _Pending:
        """Begin to send the present values of ``tensors``."""
        every, rest = self._views(tensors)
        taken = joined(every)
        averaged = list(filter(is_averaged, tensors)) if self._averages else []
        return _Pending(
            taken,
            Transfer(
                *(self._group.process_group, self._sync.source_rank),
                *(taken if rest is every else joined(rest), averaged),
            ),
        )

    @torch.no_grad()
    def _take(self, named: _Named, pending: _Pending, place: str) -> None:
        """Write what was sent ahead into the buffers, except those changed since it was sent."""
        chosen, transfer = self._traveling(named), pending.transfer
        tensors = [tensor for _, tensor in chosen]
        with self._guard(f"rank {self._group.rank}, {place}", chosen):
            transfer.wait()
        every, rest = self._views(tensors)
        changed = _differing(every, pending.taken)
        with preserve_version_counters(tensors):
            transfer.write(rest, tensors, changed)
        self._miss([name for name, tensor in chosen if id(tensor) in changed])
        if changed:
            self._alike = None
        elif self._averages:
            self._alike = joined(every)
        else:
            self._alike = transfer.came

    # Which buffers change?

    def _learn(self, named: _Named, place: str) -> None:
        """Synchronise all buffers, and find out which of them forwards change."""
        changing: list[int] = []
        if self._is_due or self._averages:
            local = self._changed_here(named)
            flags = [i in local for i in range(len(named))]
            found = torch.tensor(flags, dtype=torch.uint8, device=named[0][1].device)
            where = f"rank {self._group.rank}, {place}"
            what = "agreement on which buffers change"
            self._group.all_reduce(found, where, what, dist.ReduceOp.MAX)
            changing = [index for index, changes in enumerate(found.tolist()) if changes]
        if self._averages:
            self._averaged.update(changing)
            changing = sorted(self._averaged)
        self._send_all(named, place, self._averaged)
        if self._is_due:
            self._is_due, self._before, self._changing = False, None, changing
            constant = [index for index in range(len(named)) if index not in changing]
            self._constants = _Constants(named, constant)
            logger.info(
                "rank %d, %s: %d buffers change in forwards, and are sent; %d are constant",
                *(self._group.rank, place, len(changing), len(constant)),
            )
        elif self._averages or (self._before is None and not self._gave_up):
            self._before = [bytes_of(tensor).clone() for _, tensor in named]
            self._versions = _versions_of(named)

    def _changed_here(self, named: _Named) -> set[int]:
        """Indices of the buffers that have changed since learning began.

        With ``buffer_sync="mean"``: since the last synchronisation.
        """
        if self._before is None:
            return set() if self._averages else set(range(len(named)))
        versions = zip(_versions_of(named), self._versions, strict=True)
        return {
            index
            for index, ((_, tensor), (now, then)) in enumerate(zip(named, versions, strict=True))
            if now != then or not torch.equal(bytes_of(tensor), self._before[index])
        }

    # In a reduction

    def report(self, run: ReductionRun) -> bytes:
        """The flags of this rank since the last reduction, a counter, and a hash of the layout."""
        if self._sync.join is not None:
            return bytes(self.report_nbytes)
        named = self._parameters.buffers()
        flags = self._flags | _SAID
        self._at_report = _identities(named)
        if self._layout is None or not self._layout.is_of(named):
            flags |= _OTHER
            self._layout = _Layout(named)
        elif self._constants is not None:
            if names := self._constants.changed(named, looks_around=True):
                flags |= _NEW
                logger.info("%s: buffers that were constant have changed: %s", run.where, names)
            if self._changing and self._has_changed(named):
                flags |= _CHANGED
        self._flags = flags = flags if self._syncs == 1 else flags | _NOT_ONE
        if self._changing != []:
            # Reports that equal the last ones on all ranks are not read: so make each one differ.
            self._count = (self._count + 1) % 256
        return bytes((flags, self._count)) + self._layout.hash

    def _has_changed(self, named: _Named) -> bool:
        """Whether changing buffers differ from what all ranks had after the last exchange."""
        if self._alike is None:
            return True
        every, _ = self._views([tensor for _, tensor in self._traveling(named)])
        if not every:
            return False
        first = every[0].pieces[0]  # if any buffer has changed, usually this one has
        same = torch.equal(first, self._alike[0][: first.numel()])
        return not same or bool(_differing(every, self._alike))

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """Update the shared state from the reports of all ranks: the same result on all."""
        flags = [report[0] for report in reports]
        hashes = {report[2:] for report in reports}
        if len(hashes) > 1 or not all(each & _SAID for each in flags):
            self.reset()
            return
        missing = [rank for rank, each in enumerate(flags) if each & _MISSED]
        if missing and not self._gave_up:
            self._give_up(missing)
        told = {
            bit
            for bit in (_CHANGED, _BESIDE, _NEW, _OTHER, _NOT_ONE, _DURING)
            for f in flags
            if f & bit
        }
        self._changes_in_backward = self._changes_in_backward or _DURING in told
        if self._gave_up or told & {_NEW, _OTHER}:
            self.reset()
            if _OTHER in told:
                self._averaged.clear()
            return
        self._steps = 0 if _BESIDE in told else self._steps + 1
        self._steps_of_one = 0 if _NOT_ONE in told else self._steps_of_one + 1
        if self._changing is None:
            self._is_due = self._steps >= STEPS
        elif self._changing and self._on_cpu and min(self._steps, self._steps_of_one) >= STEPS:
            self._sends = self._changes_in_backward or _CHANGED in told

    def _give_up(self, on: Sequence[int]) -> None:
        self._gave_up = True
        rank = self._group.rank
        logger.warning(
            "rank %d: buffers have changed between a backward and the next forward, on rank %s%s. "
            "If all ranks have made the same change, this forward was right. If only rank 0 has, "
            "the other ranks have run this one forward with the old values. From now on each "
            "forward broadcasts all buffers first, as in stock DDP",
            *(rank, " and ".join(map(str, on))),
            f" ({listed(sorted(self._missed))})" if rank in on and self._missed else "",
        )

    @torch.no_grad()
    def on_all_ended(self, run: ReductionRun) -> None:
        """Begin to send the buffers for the next forward, if the reports allow it."""
        sends, self._sends = self._sends, None
        named = self._parameters.buffers()
        self._pending = None
        chosen = self._traveling(named)
        tensors = [tensor for _, tensor in chosen]
        if sends is not None and all(tensor.is_cpu for tensor in tensors):
            if sends:
                with self._guard(run.where, chosen):
                    self._pending = self._begin(tensors)
            else:
                taken = joined(self._views(tensors)[0])
                self._pending = _Pending(taken, Transfer.of_nothing(taken))
        self._at_end = _identities(named)
        self._syncs = self._flags = 0
        self._missed.clear()
        if self._at_report is not None and self._at_report != self._at_end:
            self._flags = _DURING
        self._at_report = None
        if sends is False and self._has_changed(named):  # changed by a backward for the first time
            self._miss([name for name, _ in chosen])
        self.is_first = True


@dataclass
class _Pending:
    """Buffers that were sent ahead of their forward.

    Attributes:
        taken: the bytes of this rank's buffers when they were sent.
        transfer: the collectives under way.
    """

    taken: list[Tensor]
    transfer: Transfer


class _Layout:
    """Names, shapes and dtypes of the buffers."""

    def __init__(self, named: _Named) -> None:
        self._names = [name for name, _ in named]
        self._kinds = _kinds_of(named)
        said = repr((self._names, [tuple(shape) for shape in self._kinds[0]], self._kinds[1]))
        self.hash = hashlib.sha256(said.encode()).digest()[:2]

    def is_of(self, named: _Named) -> bool:
        """Whether these buffers have the same names, shapes and dtypes."""
        return self._kinds == _kinds_of(named) and self._names == [name for name, _ in named]


class _Constants:
    """Watches the buffers that should not change.

    A new version or another tensor may be a change; on the CPU the bytes then decide. Writes
    through ``.data`` or in C++ do not change versions. So each step also compares the bytes of one
    part of these buffers, in turn.
    """

    def __init__(self, named: _Named, places: Sequence[int]) -> None:
        self._places = places
        self._tensors = [named[index][1] for index in places]
        self._versions = _versions_of([named[index] for index in places])
        self._sums = [_sums(tensor) if tensor.is_cpu else [] for tensor in self._tensors]
        self._parts = [
            (place, part) for place, sums in enumerate(self._sums) for part in range(len(sums))
        ]
        self._next = 0

    def changed(self, named: _Named, looks_around: bool = False) -> list[str]:
        """Names of the buffers in which a change was seen.

        With ``looks_around`` the bytes of the next part are compared too.
        """
        here = [named[index] for index in self._places]
        tensors, versions = [tensor for _, tensor in here], _versions_of(here)
        if versions != self._versions or not all(map(is_, tensors, self._tensors)):
            names = []
            for place, (name, tensor) in enumerate(here):
                if versions[place] == self._versions[place] and tensor is self._tensors[place]:
                    continue
                if tensor.is_cpu and _sums(tensor) == self._sums[place]:
                    self._tensors[place], self._versions[place] = tensor, versions[place]
                else:
                    names.append(name)
            if names:
                return names
        if looks_around and self._parts:
            self._next = (self._next + 1) % len(self._parts)
            place, part = self._parts[self._next]
            if _sum(bytes_of(tensors[place]), part) != self._sums[place][part]:
                return [here[place][0]]
        return []


def _identities(named: _Named) -> tuple[list[int], list[int]]:
    return [id(tensor) for _, tensor in named], _versions_of(named)


def _kinds_of(named: _Named) -> tuple[list[torch.Size], list[torch.dtype]]:
    tensors = [tensor for _, tensor in named]
    return list(map(Tensor.size, tensors)), list(map(_dtype, tensors))


def _versions_of(named: _Named) -> list[int]:
    tensors = [tensor for _, tensor in named]
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # inference tensors have no version
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _differing(messages: Sequence[Message], former: Sequence[Tensor]) -> set[int]:
    """Ids of the tensors in ``messages`` whose bytes differ from those in ``former``."""
    found: set[int] = set()
    for message, now, then in zip(messages, joined(messages), former, strict=True):
        if torch.equal(now, then):
            continue
        pieces = zip(
            message.tensors, now.split(message.sizes), then.split(message.sizes), strict=True
        )
        found.update(id(tensor) for tensor, new, old in pieces if not torch.equal(new, old))
    return found


@cache
def _factors() -> Tensor:
    """Odd random factors: a sum of words times these shows one changed word, and most swaps."""
    generator = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator, device="cpu")
    return factors.bitwise_or_(1)


def _sums(tensor: Tensor) -> list[int]:
    """Checksums of the bytes of a tensor, one for each part of ``_WORDS`` words."""
    flat = bytes_of(tensor)
    return [_sum(flat, part) for part in range(-(-flat.numel() // (8 * _WORDS)))]


def _sum(flat: Tensor, part: int) -> int:
    piece = flat[8 * _WORDS * part :][: 8 * _WORDS]
    if piece.numel() % 8 or piece.data_ptr() % 8 or piece.storage_offset() % 8:
        piece = torch.cat([piece, piece.new_zeros(-piece.numel() % 8)])
    words = piece.view(torch.int64)
    return int(torch.dot(words, _factors()[: words.numel()]))
