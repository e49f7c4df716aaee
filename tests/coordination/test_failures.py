"""The error of a failed collective: the places of all ranks, and the missing ranks."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import ranks

from tritonddp.coordination import failures, stacks
from tritonddp.coordination.group import Group
from tritonddp.coordination.processes import Process

PLACE = "step 4, bucket 1 ('a.weight', 'b.bias', ...)"
PROCESSES = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


class FakeGroup:
    """The methods of a process group that a failure report calls."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self.rank, self.size, self.get_group_store = lambda: rank, lambda: size, lambda: store
        self.name = lambda: "none"

    def _get_backend(self, device: torch.device) -> None:
        raise RuntimeError(f"No backend type associated with device type {device}")


@pytest.fixture
def store() -> Iterator[dist.Store]:
    with mock.patch.multiple(failures, _PATIENCE=0.0, _HOST_STAYS=0.0):
        yield dist.HashStore()


@pytest.fixture
def patient_store(store: dist.Store) -> Iterator[dist.Store]:
    """Waiting for the posts of the other ranks fails the test."""
    with mock.patch.multiple(failures, _PATIENCE=600.0, _LIMIT=60.0):
        yield store


def groups(store: dist.Store, size: int = 2) -> list[Group]:
    """The group of each rank."""
    of_ranks: list[Any] = [FakeGroup(rank, size, store) for rank in range(size)]
    return list(map(Group, of_ranks))


def explain(group: Group, place: str = PLACE, error: str = "broken") -> str:
    explained = group.explain(f"rank {group.rank}, {place}", "all-reduce", RuntimeError(error))
    assert type(explained) is RuntimeError
    return str(explained)


# Posts


def test_the_error_names_ranks_and_gives_remedies(store: dist.Store) -> None:
    with mock.patch.object(dist, "get_process_group_ranks", return_value=[1, 2]):
        text = explain(groups(store)[0], error="Timed out waiting 2 s")
    assert text.startswith(f"rank 0, {PLACE}, all-reduce failed: RuntimeError: Timed out waiting")
    assert "rank 1 (global rank 2) has not reported: it has ended, is stuck elsewhere, or" in text
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in text
    assert "longer timeout" in text
    text = explain(groups(store, 500)[3], error="broken " + "x" * 10_000 + "\nframe #0: c10::Error")
    assert "ranks 1, 2, 4, 5, 6, 7, 8, 9, 10, 11 and 488 more have not reported" in text
    assert "RuntimeError: broken" in text
    assert len(text) < 1500
    assert "frame #0" not in text, "only the first line of the error"


def test_an_old_post_is_not_a_new_one(store: dist.Store) -> None:
    first, second = groups(store)
    explain(second)
    assert "rank 1 failed at the same place" in explain(first)
    text = explain(first, "step 5, bucket 0 ('c')")
    assert f"rank 1 has reported only an earlier failure at {PLACE}" in text
    # The posts of a rank that has failed less often are recognized, too.
    assert "rank 0 failed at a different place: step 5, bucket 0 ('c')" in explain(second, "step 4")


@pytest.mark.parametrize(
    ("kind", "post"),
    [
        ("failed", b""),
        ("failed", b"9" * 10_000 + b" place"),
        ("failed", b"1 \xff\x1b[31m\nrank 0 is late"),
        ("process", b""),
        ("process", b"-1 2 3 host"),
        ("process", b"1 2 3 \xff\x1b[31m\n" + b"h" * 9999),
    ],
)
def test_any_content_of_the_store_makes_a_bounded_line(store, kind: str, post: bytes) -> None:
    store.set(f"tritonddp/{kind}/1", post)
    text = explain(groups(store)[0])
    assert len(text) < 1500
    lines = text.splitlines()
    assert lines[0] == f"rank 0, {PLACE}, all-reduce failed: RuntimeError: broken"
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 3


def test_no_rank_waits_if_all_have_reported(patient_store: dist.Store) -> None:
    first, second = groups(patient_store)
    patient_store.set("tritonddp/failed/1", f"1 {PLACE}, all-reduce")
    text = explain(first)
    assert "store could not be read" not in text, "it waited"
    assert "rank 1 failed at the same place" in text
    assert "rank 0 failed at the same place" in explain(second)


# Processes


def process_of(state: str = "runs") -> Process:
    """A process of this host that has ended, after it was in this state."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    process = dataclasses.replace(Process.own(), pid=child.pid, started=started)
    try:
        if state == "stopped":
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert process.state == state
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.state == "ended", "a zombie"
        child.wait()
    assert process.state == "ended", "gone"
    return process


@PROCESSES
@pytest.mark.parametrize("state", ["runs", "stopped"])
def test_the_state_of_a_process_of_this_host(state: str) -> None:
    process = process_of(state)
    assert Process.parse(process.post().encode()) == process
    successor = dataclasses.replace(Process.own(), started="1")
    assert successor.state == "ended", "its process ID belongs to another process now"


def test_the_states_of_ranks_without_a_post(store: dist.Store) -> None:
    first, other = groups(store)
    assert "not yet wrapped" not in explain(first), "this rank has not wrapped a module either"
    first.enter()
    assert "rank 1 has not reported and not yet wrapped a module: it has ended" in explain(first)
    other.enter()
    assert "rank 1 (process" in explain(first)
    assert "is running but has not reported" in explain(first)
    elsewhere = dataclasses.replace(Process.own(), pid=77, scope="another/kernel", host="node7")
    store.set("tritonddp/process/1", elsewhere.post())
    text = explain(first)
    assert "rank 1 (process 77 on node7) has not reported: it has ended, is stuck elsewhere" in text


@PROCESSES
def test_no_rank_waits_once_a_process_has_ended(patient_store: dist.Store) -> None:
    process = process_of()
    patient_store.set("tritonddp/process/2", process.post())
    patient_store.set("tritonddp/process/1", Process.own().post())
    first, second, _ = groups(patient_store, 3)
    text = explain(first)
    assert "store could not be read" not in text, "it waited"
    assert f"rank 2 ({process}) has ended.\n  The state of rank 1 is unknown.\n" in text
    # This rank reports it to the ranks of other hosts.
    patient_store.set("tritonddp/process/2", dataclasses.replace(process, scope="other").post())
    assert f"rank 2 ({process}) has ended.\n  rank 0 failed at the same place" in explain(second)


# Numbers of backwards


def test_ranks_with_other_numbers_of_backwards_are_named_with_these(store: dist.Store) -> None:
    first, second, third = groups(store, 3)
    for group, made in (first, 12), (second, 9), (third, 12):
        counters = group.new_counters(), group.new_counters()
        counters[0].reductions, counters[1].reductions = made - 1, 1
    explain(third)
    second.tell_made(store)
    text = explain(first)
    assert "rank 1 has run 3 fewer reduced backwards than this rank (9; this rank: 12)." in text
    assert "rank 2 has run" not in text
    assert "ranks 0 and 2 have run 3 more reduced backwards than this rank (12" in explain(second)
    assert "A rank that skips a batch must still run a backward" in text
    assert "First check the log" in text
    second.tell_made(store, at_end=True)
    text = explain(first)
    assert "rank 1 has ended without an exception." in text
    assert "rank 1 has run 3 fewer" in text
    assert "run the training loop inside `with model.join():`" in text
    assert "First check the log" not in text, "the log is empty"
    second.enter()  # it has wrapped another module, and continues
    store.set("tritonddp/made/2", "x")
    assert "has run" not in explain(first)


# Threads


@ranks(2)
def test_other_threads_that_wait_for_ranks_are_named(rank: int) -> None:
    other = dist.new_group()

    def save_checkpoint() -> None:
        dist.recv(torch.ones(1), 1, group=other)

    if rank == 0:
        thread = threading.Thread(target=save_checkpoint, name="checkpoint")
        thread.start()
        while not stacks.others_in_collectives():
            time.sleep(0.01)
        with mock.patch.multiple(failures, _PATIENCE=0.0, _HOST_STAYS=0.0):
            text = explain(groups(dist.HashStore())[0])
        assert "Another thread of this process also waits for other ranks: 'checkpoint', at" in text
        assert "in save_checkpoint: dist.recv(torch.ones(1), 1, group=other). If both" in text
        assert "Use a separate process group in that thread (torch.distributed.new_group)" in text
    dist.barrier()
    if rank == 0:
        thread.join()
        assert "thread" not in explain(groups(dist.HashStore())[0])
    else:
        dist.send(torch.ones(1), 0, group=other)
