"""Repeated broadcasts of tensors from one rank, their owner, to all other ranks.

They use shared memory of the host when its ranks are connected, else the process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.comm.broadcast import Message, broadcast_messages, messages_of
from tritonddp.comm.host.shared_broadcast import Part, SharedBroadcast
from tritonddp.comm.transport import TransportChoice
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import refuse_read_only

_Named = Sequence[tuple[str, Tensor]]
# Address, size and layout of a dense tensor. Messages hold views of the tensors, so no other tensor
# can get the same address meanwhile.
_STATE = (
    Tensor.data_ptr,
    attrgetter("nbytes"),
    Tensor.is_contiguous,
    Tensor.is_conj,
    Tensor.is_neg,
)


class FromOwner:
    """Overwrites some tensors of one wrapper with the values of one rank.

    The messages are cached, since creating the views would take most of the time of a broadcast.
    They are rebuilt when the memory or size of a tensor has changed. Until then, they keep the old
    memory alive.
    """

    def __init__(self, group: Group, transport: TransportChoice, kind: str) -> None:
        self._group, self._transport = group, transport
        self._kind = kind  # kind of the tensors, for error messages
        self._shared: SharedBroadcast | None = None
        # Of the last broadcast: the tensors with their names, their state, and derived values.
        self._named: _Named = []
        self._state: list[Any] = []
        self._messages: list[Message] = []
        self._layout, self._nbytes = 1, 0

    def share_memory(self, number: int) -> bool:
        """Return True if shared memory can be used from now on; the same on all ranks.

        ``number`` is identical on all ranks and identifies these tensors within the group; -1 if it
        is not known yet.
        """
        peers = self._transport.peers(self._group)
        if self._shared is None and number >= 0 and peers is not None:
            self._shared = SharedBroadcast(self._group, peers, number)
        return self._shared is not None

    def messages(self, named: _Named, max_bytes: int) -> list[Message]:
        """Return messages for the process group, each of at most ``max_bytes`` or one tensor.

        Raises:
            NotImplementedError: a tensor cannot be overwritten; the message names it.
        """
        if self._named is not named:
            refuse_read_only(named)
        tensors = [tensor for _, tensor in named]
        state = [max_bytes, *(list(map(each, tensors)) for each in _STATE)]
        if self._named is named and state == self._state:
            return self._messages
        kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in named]
        digest = hashlib.sha256(repr(kinds).encode()).digest()
        self._layout = int.from_bytes(digest[:4], "little") or 1
        self._nbytes = sum(tensor.nbytes for tensor in tensors)
        self._named, self._messages = named, messages_of(tensors, max_bytes)
        is_kept = {Tensor, Parameter}.issuperset(map(type, tensors))
        has_copies = any(message.copies for message in self._messages)
        self._state = state if is_kept and not has_copies else []
        return self._messages

    def send(
        self,
        named: _Named,
        step: int,
        owner: int,
        where: str,
        *,
        max_bytes: int,
        uses_memory: bool,
    ) -> None:
        """Overwrite the tensors with rank ``owner``'s values. All ranks call this in the same step.

        Args:
            named: the tensors with their names; the same list as before if nothing was replaced.
            step: increases from step to step.
            where: this rank and its step, for error messages.
            max_bytes: see :meth:`messages`.
            uses_memory: use shared memory, which must be available; else the process group.

        Raises:
            NotImplementedError: see :meth:`messages`.
            RuntimeError: a rank is missing, or its tensors differ; the message names it.
        """
        messages = self.messages(named, max_bytes)
        part = Part(messages, self._layout, self._nbytes, named, where, self._kind)
        by_group = partial(self._send, part, owner)
        if uses_memory and self._shared is not None:
            self._shared.send(part, step, owner, by_group)
        else:
            by_group()

    @torch.no_grad()
    def _send(self, part: Part, owner: int) -> None:
        """Send ``part`` through the process group."""
        with self._group.guard(part.where, f"broadcast of {part}"):
            broadcast_messages(part.messages, self._group.process_group, owner)
