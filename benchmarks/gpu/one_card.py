"""Two ranks over NCCL on one card: do they find each other here?

How: see :func:`benchmarks.base.ranks.on_one_card`. It is slow, but every line of the reducer runs
as it does between two cards.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import processes

# The answer of `refusal`, kept for this process and those that it starts.
ANSWER = "TRITONDDP_TWO_RANKS_REFUSED"
_SUM = "the sum over 2 ranks is right"
_LIMIT = 40.0


def refusal(limit: float = _LIMIT) -> str | None:
    """Why two ranks cannot talk over NCCL on this machine; ``None`` if they can.

    Tried once, by two processes and within ``limit`` seconds, the first time that it is asked.
    """
    if ANSWER not in os.environ:
        os.environ[ANSWER] = _try(limit) or ""
    return os.environ[ANSWER] or None


def _try(limit: float) -> str | None:
    codes, text = processes.read([sys.executable, __file__], limit, aloud=False, ranks=2)
    return answer(text, codes, limit)


def answer(text: str, codes: Sequence[int | None], limit: float) -> str | None:
    """What :func:`refusal` says of the two processes that printed ``text``.

    That is what NCCL, or else torch, said last, on one line.
    """
    if list(codes) == [0, 0] and text.count(_SUM) == 2:
        return None
    lines = [line.strip() for line in text.splitlines()]
    for pattern in (r"NCCL WARN (?!Call to)", r"^Last error", r"\w*(Error|Exception)\b"):
        said = [line for line in lines if re.search(pattern, line)]
        if said:
            return re.sub(r"^.*NCCL WARN ", "NCCL: ", said[-1])[:300]
    if any(codes) or None not in codes:
        return f"the ranks ended with {codes} and said nothing"
    return f"two ranks did not connect within {limit:.0f} s, and NCCL said nothing"


def _rank() -> None:
    """One of the two: a small all-reduce, a large one, and a broadcast."""
    import torch
    import torch.distributed as dist

    from benchmarks.base.ranks import process_group

    with process_group("nccl") as ranks:
        for numel in (1, 2**22):
            values = torch.full((numel,), 1.0 + ranks.rank, device=ranks.device)
            dist.all_reduce(values)
            assert (values == 3).all(), f"the sum of 1 and 2 over {numel} elements is {values}"
        dist.broadcast(values, src=0)
        ranks.barrier()
        print(_SUM, flush=True)


if __name__ == "__main__":
    _rank()
