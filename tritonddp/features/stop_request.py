"""A rank asks all ranks to stop after the same reduction, with a byte of its header."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tritonddp.coordination.agreement import HeaderField
from tritonddp.coordination.group import Group

logger = logging.getLogger(__name__)


class StopRequest(HeaderField):
    """Whether a rank asks all ranks to stop.

    Attributes:
        default: whether the next header of this rank asks.
        is_stopped: whether a rank has asked in the headers that all ranks have read: up to the last
            completed reduction, on a GPU up to the one before.
    """

    default = False

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked_at = -1  # number of reductions when this rank asked
        self.is_stopped = False

    def request(self, reductions: int) -> None:
        """Ask all ranks to stop in the next header; ``reductions`` have begun so far.

        Safe in signal handlers and on any thread: it takes no lock.
        """
        if self._asked_at < 0:
            self._asked_at = reductions
            self.default = not self.is_stopped

    def should_stop(self, reductions: int) -> bool:
        """Return :attr:`is_stopped`. A single rank may send no header: compare reduction counts."""
        return self.is_stopped or (self._group.size == 1 and 0 <= self._asked_at < reductions)

    def encode(self, value: bool) -> bytes:
        return bytes([value])

    def decode(self, encoded: bytes) -> bool:
        if encoded[0] > 1:
            raise ValueError
        return encoded[0] == 1

    def is_steady(self, value: bool) -> bool:
        return not value

    def read(self, values: Mapping[int, Any]) -> None:
        asking = [f"rank {rank}" for rank, asks in values.items() if asks]
        if not asking:
            return
        if not self.is_stopped:
            logger.info(
                "rank %d: stop requested by %s; all ranks stop after the same reduction",
                self._group.rank,
                " and ".join(asking),
            )
        self.is_stopped = True
        self.default = False
