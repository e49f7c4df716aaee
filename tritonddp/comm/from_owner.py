"""Tensors of one rank, their owner, get to all others, again and again.

They go through memory of the host, once its ranks are connected, else through the process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tritonddp.comm.broadcast import Message, Messages, broadcast_messages
from tritonddp.comm.host.shared_broadcast import Part, SharedBroadcast
from tritonddp.comm.transport import TransportChoice
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import refuse_read_only

_Named = Sequence[tuple[str, Tensor]]


class FromOwner:
    """Overwrites some tensors of one wrapper with those of one rank."""

    def __init__(self, group: Group, transport: TransportChoice, kind: str) -> None:
        self._group, self._transport = group, transport
        self._kind = kind  # what the tensors are, for errors
        self._cache = Messages()
        self._shared: SharedBroadcast | None = None
        # Of the last broadcast: the tensors, their messages, names and kinds; and what follows.
        self._named: _Named = []
        self._messages: list[Message] = []
        self._kinds: list[tuple[str, torch.Size, torch.dtype]] = []
        self._layout, self._nbytes = 1, 0

    def has_memory(self, number: int) -> bool:
        """Whether they may go through memory from now on: on all ranks alike.

        ``number`` is one that no other tensors of the group have, the same on all ranks; -1 if it
        is not known yet.
        """
        peers = self._transport.peers(self._group)
        if self._shared is None and number >= 0 and peers is not None:
            self._shared = SharedBroadcast(self._group, peers, number)
        return self._shared is not None

    def messages(self, tensors: Sequence[Tensor], max_bytes: int) -> list[Message]:
        """The messages through the process group, of at most ``max_bytes``, or one tensor."""
        return self._cache.of(tensors, max_bytes)

    def send(
        self,
        named: _Named,
        tensors: Sequence[Tensor],
        step: int,
        owner: int,
        where: str,
        *,
        max_bytes: int,
        uses_memory: bool,
    ) -> None:
        """Overwrite ``tensors`` with those of rank ``owner``. All ranks call this in the same step.

        Args:
            named: the tensors with their names; the same list as before if nothing was replaced.
            step: grows from step to step.
            where: this rank and its step, for errors.
            max_bytes: see :meth:`messages`.
            uses_memory: go through memory, which is there; else through the process group.

        Raises:
            NotImplementedError: a tensor cannot be overwritten; names it.
            RuntimeError: a rank is missing, or has other tensors; the message names it.
        """
        if self._named is not named:
            refuse_read_only(named)
        messages = self.messages(tensors, max_bytes)
        if self._named is not named or self._messages is not messages:
            self._named, self._messages = named, messages
            kinds = [(name, each.shape, each.dtype) for name, each in named]
            if kinds != self._kinds:
                self._kinds, self._layout = kinds, _hash_of(kinds)
                self._nbytes = sum(each.nbytes for each in tensors)
        part = Part(messages, self._layout, self._nbytes, named, where, self._kind)
        by_group = partial(self._send, part, owner)
        if uses_memory and self._shared is not None:
            self._shared.send(part, step, owner, by_group)
        else:
            by_group()

    @torch.no_grad()
    def _send(self, part: Part, owner: int) -> None:
        """Through the process group."""
        with self._group.guard(part.where, f"broadcast of {part}"):
            broadcast_messages(part.messages, self._group.process_group, owner)


def _hash_of(kinds: Sequence[tuple[str, torch.Size, torch.dtype]]) -> int:
    """The :attr:`Part.layout` of tensors with these names, shapes and dtypes."""
    return int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:4], "little") or 1
