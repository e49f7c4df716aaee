"""Broadcast of module buffers or new parameter values from one rank, the *source*.

The other ranks of the host receive them through shared memory.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, compress
from typing import Any, NamedTuple

from torch import Tensor

from tritonddp.comm.broadcast import Message, memcmp
from tritonddp.comm.host.memory_exchange import HostSums
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.memory import Memory
from tritonddp.coordination.host.peers import (
    ANY,
    LENT,
    MAPPED,
    PACKED,
    SEEN,
    SHOWN,
    Peer,
    PeerError,
    Peers,
    WaitPoint,
)
from tritonddp.kernels.flat_buffer import round_up

logger = logging.getLogger(__name__)

# Maximum number of broadcasts through memory that the source may be ahead of a receiver.
_AHEAD = 32
# The source lends memory in multiples of this size, in bytes.
_PAGE = 4096


class Part(NamedTuple):
    """The tensors of one broadcast on one rank."""

    messages: list[Message]  # of the tensors; the same list as before if no tensor has moved
    layout: int  # hash of names, shapes and dtypes; at least 1 and less than 2**32
    nbytes: int  # bytes of the tensors
    named: Sequence[tuple[str, Tensor]]  # the tensors with their names, for error messages
    where: str  # rank and step, for error messages
    kind: str  # kind of the tensors, "buffers" or "parameters", for error messages

    def __str__(self) -> str:
        names = listed([name for name, _ in self.named])
        return f"{len(self.named)} {self.kind} ({names}), {self.nbytes} bytes"


class _Point(WaitPoint):
    """The point at which ranks wait for a broadcast of buffers."""

    def check(self, late: Peer) -> None:
        own = self.wrapper
        for (kind, wrapper), (layout, _) in late.last.items():
            is_new = late.counts[kind, wrapper] > late.seen[wrapper]
            if kind == SHOWN and wrapper != own and layout == 0 and is_new:
                raise PeerError(
                    f"rank {late.rank} broadcasts the buffers of wrapper {wrapper} of the process "
                    f"group, but this rank broadcasts those of wrapper {own}. Call wrapped modules "
                    "in the same order on all ranks"
                )
        if late.counts[PACKED, ANY] > HostSums.of(self.peers).launched:
            raise PeerError(
                f"rank {late.rank} already reduces gradients and did not run this broadcast. Run "
                "the same forwards of the same wrapped modules, and the same optimizer steps, on "
                "all ranks"
            )


class SharedBroadcast:
    """Broadcasts of the buffers, or new parameter values, of one wrapper within this host.

    The source keeps the bytes of its last broadcast in memory that the other ranks have mapped.
    Contents are compared, so unchanged tensors cost only a message of a few bytes::

        source      if a byte differs: wait until all have SEEN the previous content, write; SHOWN
        receivers   wait for SHOWN of the source only; copy what differs; SEEN

    If the source has no memory, or too little, it lends new memory (LENT). Receivers map it, and
    answer (MAPPED). If a receiver cannot map it, all later SHOWN messages say that the broadcast
    uses the process group.

    The number of a broadcast consists of the step and the number of previous broadcasts in that
    step. An additional forward on one rank is therefore harmless: until the next step, a rank may
    see the previous buffers.
    """

    def __init__(self, group: Group, peers: Peers, wrapper: int) -> None:
        self.wrapper = wrapper  # number of the wrapper, identical on all ranks
        self._group, self._peers = group, peers
        self._point = _Point(wrapper, peers)
        self._over = 0  # number of the last completed broadcast
        # State of the source.
        self._memory: Memory | None = None
        self._loans = 0  # number of times that memory was lent
        self._is_refused = False  # by any rank
        self._shown: deque[int] = deque(maxlen=_AHEAD)  # numbers of the last broadcasts
        self._layout = 0  # layout of the last broadcast; 0: through the process group
        self._compared: Any = None, None, []

    def send(self, part: Part, step: int, source: int, by_group: Callable[[], None]) -> None:
        """Overwrite the tensors of ``part`` with the values of rank ``source``.

        All ranks call this, in the same step. ``by_group`` uses the process group.

        Raises:
            RuntimeError: a rank is missing, or its tensors differ; the message names it.
        """
        seq = max(self._over + 1, step << 32)
        with self._group.uninterrupted():
            if self._group.rank == source:
                self._show(part, seq, by_group)
            else:
                peer = next(each for each in self._peers.others if each.rank == source)
                self._take(part, seq, peer, by_group)

    def _wait_for(self, kind: int, seq: int, part: Part, source: Peer | None = None) -> None:
        try:
            self._point.at(seq).wait_for(kind, source=source)
        except RuntimeError as error:
            raise self._group.explain(part.where, f"broadcast of {part}", error) from error

    def _differing(self, part: Part, memory: Tensor) -> list[tuple[int, int, int]]:
        """Return differing ranges: addresses in the tensors and in the memory, and byte counts."""
        if self._compared[0] is not part.messages or self._compared[1] is not memory:
            pieces = list(chain.from_iterable(each.pieces for each in part.messages))
            sizes = list(map(Tensor.numel, pieces))
            starts = list(accumulate(sizes, initial=memory.data_ptr()))[:-1]
            columns = [list(map(Tensor.data_ptr, pieces)), starts, sizes]
            self._compared = part.messages, memory, columns
        columns = self._compared[2]
        return list(compress(zip(*columns, strict=True), map(memcmp(), *columns)))

    # The source

    def _show(self, part: Part, seq: int, by_group: Callable[[], None]) -> None:
        if len(self._shown) == _AHEAD:
            self._wait_for(SEEN, self._shown[0], part)
        memory = self._memory_for(part)
        layout = 0 if memory is None else part.layout
        differing = [] if memory is None else self._differing(part, memory)
        if differing or layout != self._layout:
            self._wait_for(SEEN, self._over, part)
        for address, start, nbytes in differing:
            ctypes.memmove(start, address, nbytes)
        self._peers.say(SHOWN, self.wrapper, layout, seq, part.nbytes)
        self._shown.append(seq)
        self._over, self._layout = seq, layout
        self._peers.flush()
        if memory is None:
            by_group()

    def _memory_for(self, part: Part) -> Tensor | None:
        """Return memory that all ranks have mapped; ``None`` if there is none."""
        if self._compared[0] is not part.messages:
            pieces = chain.from_iterable(each.pieces for each in part.messages)
            if not all(type(each) is Tensor and each.is_cpu for each in pieces):
                return None
        if self._is_refused:
            return None
        if self._memory is None or self._memory.tensor.numel() < part.nbytes:
            self._lend(part)
        return None if self._memory is None else self._memory.tensor

    def _lend(self, part: Part) -> None:
        """Hand new memory over to the other ranks."""
        self._wait_for(SEEN, self._over, part)  # in the former memory
        grows = 1 if self._memory is None else 2
        self._memory = None
        self._loans += 1
        try:
            memory = Memory.create(round_up(grows * max(part.nbytes, 1), _PAGE))
            self._point.at(self._loans).hand_over(LENT, memory)
            memory.close_descriptor()
        except OSError as error:
            self._refuse(part, str(error))
            return
        self._wait_for(MAPPED, self._loans, part)
        answers = [(each.rank, each.last[MAPPED, self.wrapper][0]) for each in self._peers.others]
        if refusing := [rank for rank, is_refused in answers if is_refused]:
            self._refuse(part, f"rank {refusing[0]} cannot map it")
        else:
            self._memory = memory

    def _refuse(self, part: Part, why: str) -> None:
        self._is_refused = True
        logger.warning(
            "%s: no shared memory for buffers on this host: %s. The buffers are sent through the "
            "process group",
            part.where,
            why,
        )

    # The other ranks

    def _take(self, part: Part, seq: int, source: Peer, by_group: Callable[[], None]) -> None:
        line = SHOWN, self.wrapper
        if source.counts[line] < seq:
            self._point.wait_for(SHOWN, waits=False)
        if source.counts[line] < seq:
            # This rank may have missed a broadcast after Ctrl-C; the source may await its SEEN.
            self._peers.answer(source, SEEN, self.wrapper, 0, seq - 1)
            self._wait_for(SHOWN, seq, part, source)
        layout, nbytes = source.last[line]
        is_alike = layout == 0 or (layout, nbytes) == (part.layout, part.nbytes)
        if layout == 0:
            by_group()
        elif is_alike:
            memory = source.lent[self.wrapper]
            assert isinstance(memory, Memory)
            if differing := self._differing(part, memory.tensor):
                for address, start, size in differing:
                    ctypes.memmove(address, start, size)
                for message in part.messages:
                    message.copy_back()
        self._peers.answer(source, SEEN, self.wrapper, 0, seq)
        self._over = source.seen[self.wrapper] = seq
        self._peers.flush()
        if not is_alike:
            raise RuntimeError(
                f"{part.where}, broadcast of {part}: the {part.kind} of rank {source.rank} "
                f"({nbytes} bytes) have different names, shapes or dtypes. Make the same changes "
                "on all ranks before the same forward or step. For buffers, you can also wrap "
                "with forward_sync_buffers=False"
            )

    def __del__(self) -> None:
        for peer in self._peers.others:
            peer.lent.pop(self.wrapper, None)
