"""Whether two ranks find each other on one card, and what a test says if they do not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, Any

import pytest
import torch

from benchmarks.base import processes
from benchmarks.base.ranks import on_one_card
from benchmarks.gpu import one_card

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
    assert on_one_card("a")["NCCL_HOSTID"] != on_one_card("b")["NCCL_HOSTID"]
