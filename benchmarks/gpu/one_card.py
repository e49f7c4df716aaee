"""Find out whether two ranks can use NCCL on one GPU of this machine.

See :func:`benchmarks.base.ranks.on_one_card` for how they do. It is slow, but every line of the
reducer runs as it does with two GPUs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

from benchmarks.base import processes

# The result of `refusal`, stored for this process and its child processes.
ANSWER = "TRITONDDP_TWO_RANKS_REFUSED"
_SUM = "the sum over 2 ranks is right"
_LIMIT = 40.0


def refusal(limit: float = _LIMIT) -> str | None:
    """Return why two ranks cannot use NCCL on one GPU of this machine; ``None`` if they can.

    The first call tries it with two processes, within ``limit`` seconds.
    """
    if ANSWER not in os.environ:
        os.environ[ANSWER] = _try(limit) or ""
    return os.environ[ANSWER] or None


def _try(limit: float) -> str | None:
    codes, text = processes.read([sys.executable, __file__], limit, aloud=False, ranks=2)
    return answer(text, codes, limit)


def answer(text: str, codes: Sequence[int | None], limit: float) -> str | None:
    """Return the result of :func:`refusal` for two processes that printed ``text``.

    It is the last message of NCCL, or else of torch, on one line.
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
    """Run as one of the two ranks: a small all-reduce, a large one, and a broadcast."""
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
