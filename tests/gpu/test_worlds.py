"""What a test in several worlds says where a world cannot be, or has hung."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from distributed import run_ranks

from benchmarks.gpu import one_card


def skipped(world: worlds.World) -> str:
    with pytest.raises(pytest.skip.Exception) as reason:
        world.run(("no_module", "no_test"), {})
    return str(reason.value)


def test_a_world_that_cannot_be_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert skipped(worlds.NCCL_1) == "nccl-1-rank: torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert skipped(worlds.NCCL_1) == "nccl-1-rank: this build of torch has no NCCL"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setenv(one_card.ANSWER, "NCCL: Duplicate GPU detected")
    assert skipped(worlds.NCCL_2) == "nccl-2-ranks: NCCL: Duplicate GPU detected"
    assert worlds.NCCL_1.refusal() is None
    assert worlds.CPU.refusal() is None


def test_after_a_test_that_hung_its_world_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "_hung", {})
    monkeypatch.setattr(worlds.World, "refusal", lambda self: None)

    def hang(*_: Any, **__: Any) -> None:
        pytest.fail(f"rank 0 of 2 {worlds.RAN_TOO_LONG} 30 s")

    monkeypatch.setattr(worlds, "run_ranks", hang)
    for world in (worlds.NCCL_2, worlds.CPU):
        with pytest.raises(pytest.fail.Exception):
            world.run(("module", "test_x"), {})
    assert skipped(worlds.NCCL_2) == "nccl-2-ranks: test_x hung before"
    with pytest.raises(pytest.fail.Exception):  # on the CPU the other tests are worth their time
        worlds.CPU.run(("module", "test_y"), {})


def _members() -> tuple[int, int]:
    """Of the group of this rank, and how many there are."""
    dist.barrier()
    return id(dist.group.WORLD), dist.get_world_size()


def _fails() -> None:
    assert dist.get_rank() == 0, "as it should"
    dist.barrier()


@pytest.mark.long
def test_the_group_of_a_world_is_kept_until_a_test_fails() -> None:
    kept = partial(run_ranks, timeout=30, keeps_group=True)
    first = kept(_members, 2)
    assert kept(_members, 2) == first
    assert [size for _, size in run_ranks(_members, 1)] == [1]
    assert [size for _, size in kept(_members, 2)] == [2, 2]
    with pytest.raises(pytest.fail.Exception, match="as it should"):
        kept(_fails, 2)
    assert [size for _, size in kept(_members, 2)] == [2, 2]
    assert [size for _, size in kept(_members, 1)] == [1]
    assert [size for _, size in run_ranks(_members, 2)] == [2, 2]


def test_a_body_may_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(pytest.skip, 2, "not here", keeps_group=True)
