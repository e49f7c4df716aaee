"""The speed of the lines between ranks: all-reduces and messages, timed in interleaved rounds.

Rounds have everything once, so that what slows the machine down for a while does so for all; each
figure is the median over rounds of what the slowest rank took.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._device import settle
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import gather_json

# Bytes of the all-reduce, and of a message; both are less where they would take longer than this.
LARGE, _MESSAGE = 16 << 20, 4 << 20
_LONGEST = 2.0
# Bytes of the first try: more than what token buckets of slow lines let through for free.
_TRY = 1 << 20
# Small all-reduces in a sample; rounds, and the seconds after which none begins but the least.
_SMALL, _ROUNDS, _LEAST, _PATIENCE = 10, 9, 3, 4.0
# Ranks from which on messages go between neighbours only, not between all pairs.
_ALL_PAIRS = 8
_WHERE = "tritonddp doctor"


class Line:
    """Times what the ranks of ``group`` exchange with tensors on ``device``."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._one = torch.zeros(1, device=device)

    def measure(self) -> dict[str, Any]:
        """Collective; alike on all ranks.

        Returns:
            ``latency`` (seconds of an all-reduce of one element), ``nbytes`` and ``seconds`` (of
            the large one), ``rate`` (bytes per second that each rank sends in it), ``pairs`` (a
            list of sender, receiver and bytes per second), ``rounds``.
        """
        rank, size = self._group.rank, self._group.size
        nbytes = self._fitting(LARGE)
        pairs = self._pairs()
        whole = torch.zeros(nbytes // 4, device=self._device)
        part = torch.zeros(max(1, min(_MESSAGE, nbytes // 2) // 4), device=self._device)
        samples: dict[str, list[float]] = defaultdict(list)
        spent, rounds = 0.0, 0
        while rounds < _ROUNDS and (rounds < _LEAST or spent < _PATIENCE):
            start = time.perf_counter()
            samples["latency"].append(self._timed(self._one, _SMALL) / _SMALL)
            samples["all-reduce"].append(self._timed(whole))
            for sender, receiver in pairs:
                if rank in (sender, receiver):
                    took = self._message(sender, receiver, part)
                    if rank == sender:
                        samples[f"{sender} {receiver}"].append(took)
            rounds += 1
            spent += self._slowest(time.perf_counter() - start)
        of_ranks = gather_json(samples, self._group, self._device, _WHERE)

        def median(name: str) -> float:
            of_rounds = zip(*(each[name] for each in of_ranks if name in each), strict=True)
            return statistics.median(map(max, of_rounds))

        seconds = median("all-reduce")
        return {
            "latency": median("latency"),
            "nbytes": nbytes,
            "seconds": seconds,
            "rate": 2 * (size - 1) / size * nbytes / seconds,
            "pairs": [[a, b, part.nbytes / median(f"{a} {b}")] for a, b in pairs],
            "rounds": rounds,
        }

    def _fitting(self, nbytes: int) -> int:
        """``nbytes``, or fewer if an all-reduce of them would take too long."""
        trial = torch.zeros(_TRY // 4, device=self._device)
        self._timed(trial)  # makes connections
        took = self._slowest(min(self._timed(trial) for _ in range(2)))
        return min(nbytes, max(_TRY, int(_TRY * _LONGEST / took) & ~1023))

    def _pairs(self) -> list[tuple[int, int]]:
        """Pairs of sender and receiver, in both directions."""
        ranks = range(self._group.size)
        if len(ranks) <= _ALL_PAIRS:
            return list(itertools.permutations(ranks, 2))
        around = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
        return around + [(b, a) for a, b in around]

    def _timed(self, tensor: Tensor, times: int = 1) -> float:
        """Seconds of all-reduces of ``tensor``, one after the other; all ranks begin together."""
        self._all_reduce(self._one)
        settle(self._device)
        start = time.perf_counter()
        for _ in range(times):
            self._all_reduce(tensor)
        settle(self._device)
        return time.perf_counter() - start

    def _message(self, sender: int, receiver: int, part: Tensor) -> float:
        """Seconds until the sender has the receiver's answer to ``part``."""
        group, rank = self._group.process_group, self._group.rank
        other = receiver if rank == sender else sender

        def send(tensor: Tensor) -> None:
            dist.send(tensor, group=group, group_dst=other)

        def receive(tensor: Tensor) -> None:
            dist.recv(tensor, group=group, group_src=other)

        first, second = (send, receive) if rank == sender else (receive, send)
        first(self._one)
        second(self._one)  # both are here
        settle(self._device)
        start = time.perf_counter()
        first(part)
        second(self._one)
        settle(self._device)
        return time.perf_counter() - start

    def _all_reduce(self, tensor: Tensor) -> None:
        self._group.all_reduce(tensor, _WHERE, f"all-reduce of {tensor.nbytes} bytes")

    def _slowest(self, seconds: float) -> float:
        """The maximum over the ranks."""
        value = torch.tensor(seconds, dtype=torch.float32, device=self._device)
        self._group.all_reduce(value, _WHERE, "exchange of times", dist.ReduceOp.MAX)
        return value.item()
