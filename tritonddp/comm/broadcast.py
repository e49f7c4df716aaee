"""Initial state and module buffers: every rank gets those of one rank, the *source*.

They travel in one message through the process group; buffers of ranks of one host through memory
that they share (:class:`SharedBroadcast`).
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain, compress
from operator import attrgetter
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import foreach_copy_
from tritonddp.comm.peer_memory import _HANDING, _MESSAGE, _PAUSE, Peer, Peers, Place
from tritonddp.coordination.collectives import all_reduce, broadcast
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.coordination.peers import LENT, MAPPED, PACKED, SEEN, SHOWN, Memory, PeerError
from tritonddp.kernels.flat_buffer import round_up

logger = logging.getLogger("tritonddp.buffers")

# So many broadcasts through memory the source may be ahead of a receiver.
_AHEAD = 32
# Memory that is lent is a multiple of this, in bytes.
_PAGE = 4096

# Where the bytes of a dense tensor are, and in which layout. Messages hold views, so no other
# tensor can get the same address meanwhile.
_STATE = (
    Tensor.data_ptr,
    attrgetter("nbytes"),
    Tensor.is_contiguous,
    Tensor.is_conj,
    Tensor.is_neg,
)


class StateBroadcast:
    """Overwrites parameters and buffers with those of one rank: of ``source.source_rank``."""

    def __init__(self, group: Group, source: Any) -> None:
        self._group = group
        self._source = source
        self.max_bytes = 250 * 1024 * 1024  # of one message
        self._messages = Messages()

    def messages_of(self, tensors: Sequence[Tensor]) -> list[Message]:
        """The messages for tensors that are sent repeatedly."""
        return self._messages.of(tensors, self.max_bytes)

    def send(self, tensors: Sequence[Tensor], place: str, what: str, again: bool = False) -> None:
        """Overwrite ``tensors``; see :func:`broadcast_coalesced`.

        For error messages ``place`` is the step of this rank, and ``what`` names the tensors. With
        ``again`` the messages are cached, for tensors that are sent repeatedly.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        group = self._group
        try:
            broadcast_coalesced(
                *(tensors, group.process_group, self._source.source_rank, self.max_bytes),
                self._messages if again else None,
            )
        except RuntimeError as error:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            raise group.explain(
                f"rank {group.rank}, {place}",
                f"broadcast of {len(tensors)} {what}, {nbytes} bytes",
                error,
            ) from error


class Messages:
    """A cache of the messages for some tensors: views of their bytes.

    Making the views would take most of the time of a broadcast. They are made anew if a tensor has
    other memory, or another size, than the last time. Until then they hold the memory.
    """

    def __init__(self) -> None:
        self._state: list[Any] = []
        self._messages: list[Message] = []

    def of(self, tensors: Sequence[Tensor], max_bytes: int) -> list[Message]:
        """The messages in which :func:`broadcast_coalesced` sends ``tensors``."""
        state = [max_bytes, *(list(map(each, tensors)) for each in _STATE)]
        if state == self._state:
            return self._messages
        messages = [Message(batch) for batch in _batches(tensors, max_bytes)]
        if {*map(type, tensors)} == {Tensor} and not any(message.copies for message in messages):
            self._state, self._messages = state, messages
        else:
            self._state, self._messages = [], []
        return messages


class Message:
    """Some tensors of one device, which are sent together.

    Attributes:
        tensors: the tensors.
        pieces: for each, its bytes, or those of its copy.
        sizes: of the pieces, in bytes.
        copies: pairs of a tensor and its copy that is sent, for tensors that are not row-major, or
            have the conjugate or negative bit.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        rows = [_row_of(tensor) for tensor in tensors]
        self.pieces = list(map(_bytes_of_row, rows))
        self.sizes = [piece.numel() for piece in self.pieces]
        self._flat: Tensor | None = None
        self.copies = [
            (tensor, row)
            for tensor, row in zip(tensors, rows, strict=True)
            if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous()
        ]

    @property
    def flat(self) -> Tensor:
        """The bytes that travel: of the only piece itself, else memory of their own.

        (That is kept with the message: new pages would cost as much as the copy into them.)
        """
        if self._flat is None:
            self._flat = self.pieces[0]
            if len(self.pieces) > 1:
                self._flat = self.pieces[0].new_empty(sum(self.sizes))
        return self._flat

    def fill(self) -> None:
        """Write the bytes of the tensors into :attr:`flat`."""
        if len(self.pieces) > 1:
            torch.cat(self.pieces, out=self.flat)

    def copy_back(self) -> None:
        """Write the copies, which were overwritten, back to their tensors."""
        for tensor, row in self.copies:
            tensor.copy_(row)


def _row_of(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is not row-major or has the conjugate or negative bit."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bytes_of_row(row: Tensor) -> Tensor:
    # (A single element may have any stride.)
    return row.as_strided((row.numel(),), (1,)).view(torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order: a view if it is row-major, else a copy."""
    return _bytes_of_row(_row_of(tensor))


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors on the CPU, uint8 ``(n,)``, are equal: ten times ``torch.equal``."""
    return not _memcmp()(one.data_ptr(), other.data_ptr(), one.numel())


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    return function


def is_averaged(tensor: Tensor) -> bool:
    """Whether the dtype of this tensor allows a mean."""
    return tensor.is_floating_point() or tensor.is_complex()


def average_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with their means over the ranks: the same bits on all.

    They are summed in fp64 if one of them has 64 bits, else in fp32.
    """
    wide = any(each.dtype in (torch.float64, torch.complex128) for each in tensors)
    with torch.no_grad():
        for same in _by_device(tensors):
            parts = [_real(each).reshape(-1) for each in same]
            total = torch.cat([part.to(torch.float64 if wide else torch.float32) for part in parts])
            all_reduce(total.div_(group.size()), group).wait()
            for tensor, part in zip(same, total.split([*map(Tensor.numel, parts)]), strict=True):
                real = part.view(_real(tensor).shape)
                tensor.copy_(torch.view_as_complex(real) if tensor.is_complex() else real)


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    group_src: int,
    max_bytes: int,
    messages: Messages | None = None,
) -> None:
    """Overwrite ``tensors`` with those of rank ``group_src`` of ``group``.

    Tensors of all dtypes travel together as bytes, so that a model with float and integer buffers
    needs one broadcast, not one per dtype. The tensors are dense, with the same shapes and dtypes
    in the same order on every rank. A message holds at most ``max_bytes``, or one tensor.
    ``messages`` is a cache for tensors that are sent repeatedly.
    """
    is_source = group.rank() == group_src
    with torch.no_grad():
        for each in (messages or Messages()).of(tensors, max_bytes):
            if is_source:
                each.fill()
            message = each.flat
            broadcast(message, group, group_src).wait()
            if is_source:
                continue
            if len(each.pieces) > 1:
                foreach_copy_(each.pieces, message.split(each.sizes))
            each.copy_back()


def _batches(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Cut ``tensors`` into lists of one device and at most ``max_bytes`` each, in a fixed order."""
    for group in _by_device(tensor for tensor in tensors if tensor.numel()):
        batch: list[Tensor] = []
        size = 0
        for tensor in group:
            if batch and size + tensor.nbytes > max_bytes:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.nbytes
        yield batch


def _by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())


class Part(NamedTuple):
    """What is broadcast, as one rank holds it.

    Attributes:
        messages: of the tensors; the same list as before if they lie where they were.
        layout: hash of names, shapes and dtypes, 1 or more, less than ``2**32``.
        nbytes: bytes of the tensors.
        named: the tensors with their names, for errors.
        where: rank and step, for errors.
    """

    messages: list[Message]
    layout: int
    nbytes: int
    named: Sequence[tuple[str, Tensor]]
    where: str

    def __str__(self) -> str:
        names = listed([name for name, _ in self.named])
        return f"{len(self.named)} buffers ({names}), {self.nbytes} bytes"


class _Point(Place):
    """Where ranks wait for a broadcast of buffers."""

    def check(self, late: Peer) -> None:
        """See :meth:`Place.check`."""
        own = self.module.number
        for (kind, wrapper), (layout, _) in late.last.items():
            is_new = late.counts[kind, wrapper] > late.seen[wrapper]
            if kind == SHOWN and wrapper != own and layout == 0 and is_new:
                raise PeerError(
                    f"rank {late.rank} broadcasts the buffers of wrapper number {wrapper} in its "
                    f"process group, and this rank those of number {own} in its process group: "
                    "call wrapped modules in the same order on all ranks"
                )
        if late.counts[PACKED, 0] > self.peers.launched:
            raise PeerError(
                f"rank {late.rank} reduces gradients already and has made no such broadcast: make "
                "the same forwards of the same wrapped modules on all ranks"
            )


class SharedBroadcast:
    """Broadcasts of the buffers of one wrapper to the other ranks of this host.

    The source keeps the bytes of its last broadcast in memory that the others have mapped. Contents
    are compared, so unchanged buffers cost a message of a few bytes::

        source      if a byte differs: wait until all have SEEN the former content, write; SHOWN
        receivers   wait for SHOWN of the source alone; copy what differs; SEEN

    If the source has no memory, or too little, it lends some (LENT). Receivers map it, and answer
    (MAPPED) when they next wait for any message. Until all have, and for good if a rank cannot, the
    message SHOWN says that the broadcast goes through the process group.

    A broadcast has a number: the step, and how many of this step were before it. Only one that is
    over counts, so that Ctrl-C in a wait leaves the ranks alike if they repeat the forward; else a
    rank may see the former buffers until the next step.

    Args:
        group, peers: the ranks, which are on one host.
        number: of the wrapper, the same on all ranks.
    """

    def __init__(self, group: Group, peers: Peers, number: int) -> None:
        self.number = number
        self._group, self._peers = group, peers
        self._point = _Point(SimpleNamespace(number=number), peers)
        self._over = 0  # number of the last broadcast that is over
        # Of the source.
        self._memory: Memory | None = None
        self._loans = 0  # how often memory was lent
        self._is_mapped = self._is_refused = False  # by all ranks; by any rank
        self._shown: deque[int] = deque(maxlen=_AHEAD)  # numbers of the last broadcasts
        self._layout = 0  # of the last one; 0: through the process group
        self._compared: Any = None, None, []

    def send(self, part: Part, step: int, source: int, by_group: Callable[[], None]) -> None:
        """Overwrite the tensors of ``part`` with those of rank ``source``.

        All ranks call this, in the same step. ``by_group`` uses the process group.

        Raises:
            RuntimeError: a rank is missing, or has other tensors; the message names it.
        """
        number = max(self._over + 1, step << 32)
        if self._group.rank == source:
            self._show(part, number, by_group)
        else:
            peer = next(each for each in self._peers.others if each.rank == source)
            self._take(part, number, peer, by_group)

    def _wait_for(self, kind: int, number: int, part: Part, source: Peer | None = None) -> None:
        self._point.number = number
        try:
            self._point.wait_for(kind, source=source)
        except RuntimeError as error:
            raise self._group.explain(part.where, f"broadcast of {part}", error) from error

    def _flush(self) -> None:
        if self._peers.sends is not self._peers.direct_sends:
            self._peers.flush()

    def _differing(self, part: Part, memory: Tensor) -> list[tuple[int, int, int]]:
        """What differs: addresses in the tensors and in the memory, and number of bytes."""
        if self._compared[0] is not part.messages or self._compared[1] is not memory:
            pieces = list(chain.from_iterable(each.pieces for each in part.messages))
            sizes = list(map(Tensor.numel, pieces))
            starts = list(accumulate(sizes, initial=memory.data_ptr()))[:-1]
            columns = [list(map(Tensor.data_ptr, pieces)), starts, sizes]
            self._compared = part.messages, memory, columns
        columns = self._compared[2]
        return list(compress(zip(*columns, strict=True), map(_memcmp(), *columns)))

    # The source

    def _show(self, part: Part, number: int, by_group: Callable[[], None]) -> None:
        peers = self._peers.others
        if len(self._shown) == _AHEAD:
            self._wait_for(SEEN, self._shown[0], part)
        memory = self._memory_for(part)
        layout = 0 if memory is None else part.layout
        differing = [] if memory is None else self._differing(part, memory)
        if differing or layout != self._layout:
            self._wait_for(SEEN, self._over, part)
        for address, start, nbytes in differing:
            ctypes.memmove(start, address, nbytes)
        with Uninterrupted():  # a content that was shown is written no more until it was seen
            self._peers.say(peers, SHOWN, self.number, layout, number, part.nbytes)
            self._shown.append(number)
            self._over, self._layout = number, layout
        self._flush()
        if memory is None:
            by_group()

    def _memory_for(self, part: Part) -> Tensor | None:
        """Memory that all ranks have mapped; ``None`` if there is none, or not yet."""
        if self._compared[0] is not part.messages:
            pieces = chain.from_iterable(each.pieces for each in part.messages)
            if not all(type(each) is Tensor and each.is_cpu for each in pieces):
                return None
        if self._is_refused:
            return None
        if self._memory is None or self._memory.tensor.numel() < part.nbytes:
            self._lend(part)
            return None
        if not self._is_mapped:
            self._point.wait_for(MAPPED, waits=False)
            peers, answer = self._peers.others, (MAPPED, self.number)
            came = [each for each in peers if each.counts[answer] == self._loans]
            if refusing := [each.rank for each in came if each.last[answer][0]]:
                self._refuse(part, f"rank {refusing[0]} cannot map it")
                return None
            self._is_mapped = len(came) == len(peers)
        return self._memory.tensor if self._is_mapped else None

    def _lend(self, part: Part) -> None:
        """Hand new memory over to the other ranks, without waiting for them."""
        self._wait_for(SEEN, self._over, part)  # the former memory
        grows = 1 if self._memory is None else 2
        self._memory, self._is_mapped = None, False
        self._loans += 1
        end = monotonic() + _HANDING
        try:
            memory = Memory.create(round_up(grows * max(part.nbytes, 1), _PAGE))
            message = _MESSAGE.pack(LENT, self.number, 0, self._loans, memory.tensor.numel())
            for peer in self._peers.others:
                while not peer.hand_over(message, memory.descriptor):
                    if monotonic() > end:
                        raise TimeoutError("too many file descriptors are in flight")
                    self._point.wait_for(LENT, waits=False)
                    sleep(_PAUSE)
            memory.close_descriptor()
            self._memory = memory
        except OSError as error:
            self._refuse(part, str(error))

    def _refuse(self, part: Part, why: str) -> None:
        self._is_refused, self._memory = True, None
        logger.warning(
            "%s: no memory for buffers that the ranks of this host share: %s. They go through the "
            "process group",
            *(part.where, why),
        )

    # The other ranks

    def _take(self, part: Part, number: int, source: Peer, by_group: Callable[[], None]) -> None:
        line = SHOWN, self.number
        if source.counts[line] < number:
            self._point.wait_for(SHOWN, waits=False)
        if source.counts[line] < number:
            # If an earlier one was left out here, after Ctrl-C, the source may wait for this.
            self._peers.say([source], SEEN, self.number, 0, number - 1, 0)
            self._wait_for(SHOWN, number, part, source)
        layout, nbytes = source.last[line]
        is_alike = layout == 0 or (layout, nbytes) == (part.layout, part.nbytes)
        if layout == 0:
            by_group()
        elif is_alike:
            memory = source.lent[self.number]
            assert isinstance(memory, Memory)
            if differing := self._differing(part, memory.tensor):
                for address, start, size in differing:
                    ctypes.memmove(address, start, size)
                for message in part.messages:
                    message.copy_back()
        with Uninterrupted():
            self._peers.say([source], SEEN, self.number, 0, number, 0)
            self._over = source.seen[self.number] = number
        self._flush()
        if not is_alike:
            raise RuntimeError(
                f"{part.where}, broadcast of {part}: rank {source.rank} has other buffers, of "
                f"{nbytes} bytes: names, shapes or dtypes differ. Add, replace and resize buffers "
                "on all ranks before the same forward, or wrap with buffer_sync='off'"
            )

    def __del__(self) -> None:
        for peer in self._peers.others:
            peer.lent.pop(self.number, None)
