"""The way of one gradient through the package: files, functions, calls, and moves between rooms.

``python tests/walk.py [TREE]`` runs two ranks over gloo with the package of a working tree, by
default this one, and prints what the backward of a steady step calls: through the process group,
through memory of the host, and on a GPU (the recorded one, whose kernels are faked; see
``reducer/test_call_budget.py``). A *move* is a call, or the next call after a return, of a function
in another room.
"""

import contextlib
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from launched import in_two_ranks

# (The ranks are spawned with the same arguments.)
TREE = Path(sys.argv[1]).resolve() if sys.argv[1:] else Path(__file__).parents[1]
TESTS = TREE / "tests"  # what fakes the GPU has to fit the package
sys.path[:0] = [str(TREE), str(TESTS), str(TESTS / "reducer")]

import tritonddp  # noqa: E402  (before a test module puts its own tree first)

WAYS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "process group": ({"transport": "process_group"}, 1, False),
    "memory of the host": ({}, 1, False),
    "a GPU, two buckets": ({"transport": "process_group"}, 2, True),
}


def walk(buckets: int, size: int = 64, **options: Any) -> list[tuple[str, str]]:
    """File and function of each call that the backward of a steady step makes, in order."""
    from steady_step import WARM_UP, Vectors

    library = str(Path(tritonddp.__file__).parent)
    cap = size * 4 / 2**20
    ddp = tritonddp.DistributedDataParallel(Vectors(buckets, size), bucket_cap_mb=cap, **options)
    for _ in range(WARM_UP):
        ddp.zero_grad()
        ddp(torch.ones(size)).backward()
    assert len(ddp.reducer.buckets) == buckets
    ddp.zero_grad()
    loss, found = ddp(torch.ones(size)), []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(library):
            name = getattr(code, "co_qualname", code.co_name)  # of Python 3.11
            found.append((code.co_filename[len(library) + 1 :], name))

    sys.setprofile(note)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    return found


def _walk_all(rank: int) -> None:
    from test_call_budget import without_a_gpu

    for name, (options, buckets, is_gpu) in WAYS.items():
        with without_a_gpu() if is_gpu else contextlib.nullcontext():
            found = walk(buckets, **options)
        if rank == 0:
            rooms = [file.partition("/")[0] for file, _ in found]
            moves = sum(one != other for one, other in pairwise(rooms))
            classes = {name.partition(".")[0] for _, name in found if "." in name}
            print(
                f"{name:20} {len({file for file, _ in found})} files, {len(set(found))} functions, "
                f"{len(classes)} classes, {len(found)} calls, {moves} moves: "
                + " ".join(
                    one for one, other in zip(rooms, ["", *rooms], strict=False) if one != other
                )
            )


if __name__ == "__main__":
    in_two_ranks(_walk_all)
