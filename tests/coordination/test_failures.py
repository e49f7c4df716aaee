"""A collective that fails says where this rank and the others are, and who is missing."""

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import give_up_after, ranks
from launched import ROOT
from torch import nn

from tritonddp import DistributedDataParallel
from tritonddp.coordination import failures
from tritonddp.coordination.failures import FailureReport, History
from tritonddp.coordination.group import Group
from tritonddp.coordination.processes import Process

PLACE = "step 4, bucket 1 ('a.weight', 'b.bias', ...)"
# A process may take long to start on a busy machine; a test that hangs ends here.
LIMIT = 120.0
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def failure(
    group: dist.ProcessGroup,
    place: str = PLACE,
    collective: Callable[..., Any] = dist.all_reduce,
    what: str = "all-reduce of 16 bytes",
    **options: Any,
) -> str:
    """What the error of a collective that fails says."""
    try:
        collective(torch.ones(4), group=group, **options)
    except RuntimeError as error:
        explained = Group(group).explain(f"rank {group.rank()}, {place}", what, error)
        assert type(explained) is RuntimeError
        return str(explained)
    pytest.fail("the collective was to fail")


def impatient(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group in which a collective fails when a rank is two seconds late."""
    group = dist.new_group(ranks)
    if isinstance(group, dist.ProcessGroup):
        dist.barrier(group)  # its connections exist
        give_up_after(2, group)
    return group


# Ranks that live


@pytest.mark.long
@ranks(2)
def test_a_rank_that_does_not_come_is_named_and_learns_where_it_was_waited_for(rank: int) -> None:
    group = impatient()
    if rank == 0:
        text = failure(group)
        dist.barrier()
        assert text.startswith(f"rank 0, {PLACE}, all-reduce of 16 bytes failed: RuntimeError: ")
        assert "Timed out waiting" in text.splitlines()[0]
        assert "rank 1 has not reported: it has ended, is stuck elsewhere, or made fewer" in text
        assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in text
        assert "longer timeout" in text
    else:
        dist.barrier()
        text = failure(group)
        assert "rank 0 failed at the same place" in text
        assert "rank 0 has not reported" not in text


@pytest.mark.long
@ranks(3)
def test_of_three_ranks_the_missing_one_is_told_from_those_that_failed_too(rank: int) -> None:
    group = impatient()
    if rank != 2:
        text = failure(group)
        assert f"rank {1 - rank} failed at the same place" in text
        assert "rank 2 has not reported" in text
    dist.barrier()


@pytest.mark.long
@ranks(2)
def test_ranks_at_different_steps_read_each_others_place(rank: int) -> None:
    group = impatient()
    if rank == 0:
        text = failure(group)
        assert "rank 1 failed elsewhere: at step 3, bucket 0 ('c'), broadcast of 16 bytes." in text
    else:
        text = failure(
            group, "step 3, bucket 0 ('c')", dist.broadcast, "broadcast of 16 bytes", group_src=0
        )
        assert f"rank 0 failed elsewhere: at {PLACE}, all-reduce of 16 bytes." in text
    assert f"rank {1 - rank} has not reported" not in text


@pytest.mark.long
@ranks(3)
def test_ranks_of_a_subgroup_are_named_in_both_ways(rank: int) -> None:
    group = impatient([1, 2])
    if rank == 1:
        text = failure(group)
        assert text.startswith("rank 0, ")
        assert "rank 1 (global rank 2) has not reported" in text
    dist.barrier()


# Ranks that die or stop. These processes are the test's own: those of @ranks must live.


def run(
    scenario: Callable[..., None], store: str, survivors: list[int], folder: Path, size: int = 3
) -> dict[int, str]:
    """Run a scenario; what the error says on each survivor, of ``size`` ranks.

    Args:
        scenario: run by each process with its rank.
        store: ``"file"``, or ``"tcp"``, whose host is rank 0.
        survivors: ranks that must end by themselves. The others are killed at the end.
        folder: an empty one.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    processes = []
    try:
        for rank in range(size):
            with (folder / f"log{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, scenario.__name__, store, str(rank), str(size)],
                        cwd=folder,
                        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + LIMIT
        for rank in survivors:
            try:
                status: int | None = processes[rank].wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
            log_of_rank = (folder / f"log{rank}").read_text()
            assert status == 0, f"rank {rank} ended with {status}:\n{log_of_rank}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {rank: (folder / f"text{rank}").read_text() for rank in survivors}


def join(store: str, rank: int, size: int, timeout: float) -> dist.ProcessGroup:
    """Initialise the default group, and make one with a timeout in seconds."""
    limit = timedelta(seconds=LIMIT)
    if store == "file":
        shared: dist.Store = dist.FileStore("store", size)
    elif rank == 0:
        shared = dist.TCPStore("127.0.0.1", 0, size, True, limit, wait_for_workers=False)
        Path("port.new").write_text(str(shared.port))
        Path("port.new").rename("port")
    else:
        while not Path("port").exists():
            time.sleep(0.01)
        port = int(Path("port").read_text())
        shared = dist.TCPStore("127.0.0.1", port, size, False, limit)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=limit)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier(group)
    give_up_after(timeout, group)
    return group


def killed_amid_all_reduce(store: str, rank: int, size: int, victim: int) -> None:
    group = join(store, rank, size, LIMIT)
    content = torch.ones(1 << 24)
    work = dist.all_reduce(content, group=group, async_op=True)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        work.wait()
    except RuntimeError as error:
        explained = Group(group).explain(f"rank {rank}, {PLACE}", "all-reduce", error)
        Path(f"text{rank}").write_text(str(explained))
        # The store lives with rank 0, which must not end while others read.
        while len(list(Path().glob("text*"))) < size - 1:
            time.sleep(0.01)


def last_is_killed(store: str, rank: int, size: int) -> None:
    killed_amid_all_reduce(store, rank, size, victim=size - 1)


def first_is_killed(store: str, rank: int, size: int) -> None:
    killed_amid_all_reduce(store, rank, size, victim=0)


def first_is_stopped(store: str, rank: int, size: int) -> None:
    group = join(store, rank, size, 2)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    Path(f"text{rank}").write_text(failure(group))


def killed_beside_its_worker(store: str, rank: int, size: int) -> None:
    """The forked worker holds all sockets of the rank: none is closed by its death."""
    ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=join(store, rank, size, LIMIT))
    for _ in range(3):
        ddp(torch.ones(1, 4)).sum().backward()
    if rank == size - 1:
        worker = os.fork()
        if worker == 0:
            time.sleep(LIMIT)
            os._exit(0)
        Path("worker").write_text(str(worker))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            ddp(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        os.kill(int(Path("worker").read_text()), 0)  # it lives
        Path(f"text{rank}").write_text(str(error))
        while len(list(Path().glob("text*"))) < size - 1:
            time.sleep(0.01)
        os._exit(0)


@pytest.mark.long
def test_a_rank_killed_while_its_forked_worker_is_stuck_is_named_before_that_ends(
    tmp_path: Path,
) -> None:
    try:
        for text in run(killed_beside_its_worker, "tcp", [0, 1], tmp_path).values():
            assert "rank 2 (process" in text
            assert "has ended" in text
    finally:
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("store", [pytest.param("file", marks=pytest.mark.thorough), "tcp"])
def test_a_rank_killed_amid_an_all_reduce_is_named_by_all_others(
    store: str, tmp_path: Path
) -> None:
    texts = run(last_is_killed, store, [0, 1], tmp_path)
    for rank, text in texts.items():
        assert text.startswith(f"rank {rank}, {PLACE}, all-reduce failed: RuntimeError: "), text
        assert "rank 2 has not reported" in text
        assert f"rank {1 - rank} failed at the same place" in text


@pytest.mark.long
def test_a_rank_that_exchanges_nothing_with_the_dead_one_fails_too(tmp_path: Path) -> None:
    for text in run(last_is_killed, "tcp", [0, 1, 2], tmp_path, size=4).values():
        assert "rank 3 has not reported" in text, "and no other"
        assert "failed at the same place" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "size"),
    [pytest.param(first_is_killed, 4, marks=pytest.mark.thorough), (first_is_stopped, 3)],
)
def test_a_store_whose_host_died_or_stopped_neither_hangs_nor_hides_the_error(
    scenario: Callable[..., None], size: int, tmp_path: Path
) -> None:
    texts = run(scenario, "tcp", list(range(1, size)), tmp_path, size)
    for rank, text in texts.items():
        assert text.startswith(f"rank {rank}, {PLACE}, all-reduce"), text
        assert "failed: RuntimeError: " in text.splitlines()[0]
        assert "store could not be asked" in text
        assert "Nothing is known of ranks 0" in text
        assert "has not reported:" not in text, "nobody was asked"


@pytest.mark.long
def test_a_killed_rank_0_is_named_where_the_store_has_no_host(tmp_path: Path) -> None:
    for text in run(first_is_killed, "file", [1, 2], tmp_path).values():
        assert "rank 0 has not reported" in text


# What is posted and read


class FakeGroup:
    """As much of a process group as a roll call needs."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self.rank, self.size, self.get_group_store = lambda: rank, lambda: size, lambda: store
        self.name = lambda: "none"

    def _get_backend(self, device: torch.device) -> None:
        raise RuntimeError(f"No backend type associated with device type {device}")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(failures, "_PATIENCE", 0.0)
    monkeypatch.setattr(failures, "_HOST_STAYS", 0.0)
    return dist.HashStore()


def reports(store: dist.Store, size: int = 2) -> list[FailureReport]:
    """Of each rank."""
    groups: list[Any] = [FakeGroup(rank, size, store) for rank in range(size)]
    return [FailureReport(group, History()) for group in groups]


def explain(report: FailureReport, place: str = PLACE, error: str = "broken") -> str:
    rank = report._group.rank()
    return str(report.explain(f"rank {rank}, {place}", "all-reduce", RuntimeError(error)))


def test_a_post_of_a_group_that_was_destroyed_is_not_taken_for_a_new_one(store: dist.Store) -> None:
    explain(reports(store)[1])
    first, second = reports(store)  # groups of the same name in the same store
    second.enter()
    assert "failed at the same place" not in explain(first)


def test_an_old_post_is_not_taken_for_a_new_one(store: dist.Store) -> None:
    first, second = reports(store)
    explain(second)
    assert "rank 1 failed at the same place" in explain(first)
    text = explain(first, "step 5, bucket 0 ('c')")
    assert f"rank 1 has not reported this failure, only an earlier one at {PLACE}" in text
    # It takes up the count of the others, though it has failed less often.
    assert "rank 0 failed elsewhere: at step 5, bucket 0 ('c')" in explain(second, "step 4")


POSTS: dict[str, list[bytes]] = {
    "tritonddp/0/failed/1": [
        b"",
        b"no number",
        b"-1 place",
        b"9" * 10_000 + b" place",
        b"1 \xff\xfe\x1b[31m\nrank 0 is to blame",
        b"1 " + "\N{SNOWMAN}".encode() * 1_000_000,
    ],
    "tritonddp/process/1": [
        b"",
        b"x",
        b"1 2 3",
        b"-1 2 3 host",
        b"9" * 10_000,
        b"1 2 3 \xff\x1b[31m\n" + b"h" * 9999,
    ],
}


@pytest.mark.parametrize(
    ("key", "post"), [(key, post) for key, posts in POSTS.items() for post in posts]
)
def test_whatever_is_in_the_store_makes_a_bounded_line(
    store: dist.Store, key: str, post: bytes
) -> None:
    store.set(key, post)  # type: ignore[arg-type]
    text = explain(reports(store)[0])
    assert len(text) < 1500
    assert text.startswith(f"rank 0, {PLACE}, all-reduce failed: RuntimeError: broken\n")
    assert all(line.isprintable() for line in text.splitlines())
    assert len(text.splitlines()) == 3


def test_only_the_first_line_of_a_long_error_is_repeated(store: dist.Store) -> None:
    text = explain(reports(store)[0], error="broken " + "x" * 10_000 + "\nframe #0: c10::Error")
    assert "RuntimeError: broken" in text
    assert len(text) < 1500
    assert "frame #0" not in text


def test_many_ranks_are_counted(store: dist.Store) -> None:
    text = explain(reports(store, 500)[3])
    assert "ranks 0, 1, 2, 4, 5, 6, 7, 8, 9, 10 and 489 more have not reported" in text


# Processes


def process_of(state: str) -> Process:
    """A process of this host in some state."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    process = dataclasses.replace(Process.own(), pid=child.pid, started=started)
    try:
        if state == "runs":
            assert process.state == "runs"
        elif state == "stopped":
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            assert process.state == "stopped"
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.state == "ended", "a zombie"
        child.wait()
    assert process.state == "ended", "gone"
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("state", ["runs", "stopped"])
def test_a_process_of_this_host_is_told_from_one_that_died(state: str) -> None:
    process = process_of(state)
    assert Process.parse(process.post().encode()) == process
    successor = dataclasses.replace(Process.own(), started="1")
    assert successor.state == "ended", "its number belongs to another process now"


def test_nothing_is_said_of_a_process_that_is_elsewhere(store: dist.Store) -> None:
    elsewhere = dataclasses.replace(Process.own(), pid=77, scope="another/kernel", host="node7")
    store.set("tritonddp/process/1", elsewhere.post())
    text = explain(reports(store)[0])
    assert "rank 1 (process 77 on node7) has not reported: it has ended, is stuck elsewhere" in text


def test_a_rank_that_has_not_wrapped_its_module_is_told_from_one_that_has(
    store: dist.Store,
) -> None:
    report = reports(store)[0]
    assert "nor begun to wrap" not in explain(report), "this rank has not, either"
    report.enter()
    assert "rank 1 has not reported, nor begun to wrap a module: it has ended" in explain(report)
    other = reports(store)[1]
    other.enter()
    assert "rank 1 (process" in explain(report)
    assert "runs but has not reported" in explain(report)


if __name__ == "__main__":
    if sys.platform == "linux":
        # Nothing outlives the test process, however it ends.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    scenarios = [last_is_killed, first_is_killed, first_is_stopped, killed_beside_its_worker]
    _, name, where, number, count = sys.argv
    next(each for each in scenarios if each.__name__ == name)(where, int(number), int(count))
