"""Whether two ranks find each other on one card, and what a test says if they do not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import IO, Any

import one_card
import processes
import pytest
import torch
import torch.distributed as dist
import worlds
from distributed import run_ranks

# What NCCL 2.27 and torch print for two ranks with one host name.
DUPLICATE = """
host:1:2 [0] NCCL INFO Bootstrap: Using lo:127.0.0.1<0>
host:1:2 [0] init.cc:916 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 65000
Traceback (most recent call last):
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 65000
"""  # noqa: E501
RIGHT = "the sum over 2 ranks is right\n" * 2


@pytest.fixture(autouse=True)
def nothing_asked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(one_card.ANSWER, "")  # so that the variable is restored afterwards
    monkeypatch.delenv(one_card.ANSWER)


@pytest.mark.parametrize(
    ("printed", "codes", "expected"),
    [
        (RIGHT, [0, 0], None),
        (RIGHT, [0, 1], "the ranks ended with [0, 1] and said nothing"),
        (
            DUPLICATE,
            [1, None],
            "NCCL: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 65000",
        ),
        ("RuntimeError: no", [1, None], "RuntimeError: no"),
        ("", [None, None], "two ranks did not connect within 40 s, and NCCL said nothing"),
        ("", [-11, None], "the ranks ended with [-11, None] and said nothing"),
    ],
)
def test_the_reason_is_what_nccl_said_last(
    printed: str, codes: list[int | None], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run(command: Sequence[str], limit: float, output: IO[bytes], **_: Any) -> Any:
        calls.append(limit)
        output.write(printed.encode())
        return codes

    monkeypatch.setattr(processes, "run", run)
    assert one_card.refusal() == expected
    assert one_card.refusal() == expected
    assert calls == [40], "asked more than once"
    assert os.environ[one_card.ANSWER] == (expected or ""), "child processes must not ask again"


@pytest.mark.long
def test_without_a_card_the_probe_ends_with_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert one_card.refusal() is not None


def test_each_rank_is_another_host_to_nccl() -> None:
    assert one_card.environment("a")["NCCL_HOSTID"] != one_card.environment("b")["NCCL_HOSTID"]


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
