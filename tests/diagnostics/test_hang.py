"""Ranks that wait log the rank that is behind, and the stack of its Python code."""

import contextlib
import gc
import itertools
import json
import logging
import os
import re
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import give_up_after, ranks
from launched import played
from logged import Kept, logged
from recording.device import recording
from torch import nn

from tritonddp import DistributedDataParallel
from tritonddp._torch import store_of
from tritonddp.diagnostics import hang

THREAD, LOGGER = "tritonddp-hang", "tritonddp.diagnostics.hang"


@contextlib.contextmanager
def seconds(limit: str, **more: str) -> Iterator[None]:
    """Context: wrappers created inside report after ``limit`` seconds."""
    with mock.patch.dict(os.environ, {hang.SECONDS: limit, **more}):
        yield


class Reports(Kept):
    """Keeps log records, and creates a file once a line contains all these texts.

    A late rank waits for this file, so that the other ranks report it on a busy machine too.
    """

    def __init__(self, path: Path, *texts: str) -> None:
        super().__init__()
        self.path, self.texts = path, texts

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self.line:
            self.path.touch()

    @property
    def line(self) -> str:
        """The first line that contains all texts."""
        lines = (line for line in self.lines() if all(text in line for text in self.texts))
        return next(lines, "")


@contextlib.contextmanager
def reports(limit: str, path: Path, *texts: str, **more: str) -> Iterator[Reports]:
    """Context: wrappers created inside report after ``limit`` seconds. See :class:`Reports`."""
    gc.collect()  # wrappers of other tests, whose groups were destroyed
    kept = Reports(path, *texts)
    with seconds(limit, **more), logged(logging.INFO, LOGGER, kept):
        yield kept


def tokenize(*paths: Path) -> None:
    """Wait until these files exist."""
    while not all(path.exists() for path in paths):
        time.sleep(0.1)


def step(model: nn.Module, rank: int) -> None:
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    weight = model.module.weight
    torch.testing.assert_close(weight.grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("transport", ["auto", "process_group"])
@ranks(3)
def test_the_late_rank_is_named_and_training_continues(
    transport: str, rank: int, tmp_path: Path
) -> None:
    place = "in step 3, at the end of a"
    with reports("1", tmp_path / str(rank), place, "rank 1 (process", "tokenize") as kept:
        model = DistributedDataParallel(nn.Linear(2, 2), transport=transport)
        for number in range(4):
            if number == 2 and rank == 1:
                tokenize(*(tmp_path / str(each) for each in range(3)))
            step(model, rank)
    report = kept.line
    assert "for bucket 0" in report.splitlines()[0]
    assert "is behind: in step 2, outside forward and backward, at" in report
    assert f"{__file__}:" in report
    assert re.search(r"in tokenize: (time\.sleep\(0\.1\)|while not all\(path)", report)
    waited = [int(re.findall(r"for (\d+) s", each)[0]) for each in kept.lines() if place in each]
    assert all(b > 2 * a - 2 for a, b in itertools.pairwise(waited)), "at doubling intervals"
    warned = {each.levelno for each in kept.records if place in each.getMessage()}
    assert warned == {logging.INFO if rank else logging.WARNING}, "once a host"


class SlowStore:
    """A store whose calls take some seconds."""

    def __init__(self, store: Any, pause: float) -> None:
        self._store, self._pause = store, pause

    def __getattr__(self, name: str) -> Any:
        time.sleep(self._pause)
        return getattr(self._store, name)


@pytest.mark.parametrize("pause", [0.2, 60.0])
@ranks(3)
def test_a_slow_store_delays_only_the_report(pause: float, rank: int, tmp_path: Path) -> None:
    connect = hang.own_connection
    slow = mock.patch.object(hang, "own_connection", lambda group: SlowStore(connect(group), pause))
    patience = mock.patch.multiple(hang, _PATIENCE=0.3, _NO_ANSWER=3.0)
    text = "in tokenize" if pause < 1 else hang._NO_STORE
    with slow, patience, reports("2", tmp_path / str(rank), text):
        model = DistributedDataParallel(nn.Linear(2, 2))
        step(model, rank)
        if rank == 1:
            tokenize(tmp_path / "0")
        step(model, rank)


@pytest.mark.long
@ranks(2, interprets=True)
def test_the_thread_reports_while_the_host_waits_for_its_device(rank: int, tmp_path: Path) -> None:
    with reports("2", tmp_path / str(rank), "in tokenize") as kept, recording():
        model = DistributedDataParallel(nn.Linear(2, 2).cuda())

        def backward() -> None:
            model(torch.ones(1, 2, device="cuda")).sum().backward()

        for _ in range(3):
            backward()
        torch.cuda.synchronize()
        if rank == 1:
            tokenize(tmp_path / "0")
            backward()
            return
        # As over NCCL, the host continues, and the collectives complete later.
        late: list[Any] = []
        original = dist.Work.wait

        def defer(work: Any, *_: Any) -> None:
            late.append(partial(original, work))

        with mock.patch.object(dist.Work, "wait", defer):
            backward()
        began = time.time()
        assert late
        for wait in late:  # torch.cuda.synchronize()
            wait()
        ended = time.time()
    report = next(each for each in kept.records if each.getMessage() == kept.line)
    assert report.threadName == THREAD
    assert began < report.created < ended
    assert "rank 0, in step 4, waiting for the device, for bucket 0" in kept.line.splitlines()[0]


@ranks(2)
def test_a_rank_that_does_not_answer_and_one_that_still_wraps(rank: int, tmp_path: Path) -> None:
    folder, wraps = tmp_path / "hangs", tmp_path / "wraps"
    held = mock.patch.object(hang._GroupWatch, "look")
    silent = "does not respond: it is running: it has made progress recently, its store is slow, or"
    with (
        reports(
            "1", wraps, "rank 0 has not started to wrap", **{hang.DIRECTORY: str(folder)}
        ) as kept,
        held if rank == 0 else contextlib.nullcontext(),
    ):
        if rank == 0:
            tokenize(wraps)
        model = DistributedDataParallel(nn.Linear(2, 2))
        while rank == 0 and not any(silent in each.read_text() for each in folder.glob("*")):
            time.sleep(0.1)
        model(torch.ones(1, 2)).sum().backward()
        while rank == 1 and "continues" not in kept.lines()[-1]:  # all files are written then
            time.sleep(0.1)
    if rank == 1:
        wrapping, *_, waiting = [line for line in kept.lines() if line.startswith("waiting for")]
        assert "rank 0 has not started to wrap a module" in wrapping
        assert silent in waiting
        (file,) = folder.iterdir()
        found = json.loads(file.read_text())
        assert found["report"] == waiting
        assert any("test_hang.py" in line for each in found["stacks"].values() for line in each)


def test_errors_of_the_number_of_seconds() -> None:
    for text in "soon", "-1", "nan":
        with seconds(text), pytest.raises(ValueError, match=f"{hang.SECONDS}.*{text!r}"):
            hang.hang_seconds()


# Texts of reports


def fake_group(size: int = 2) -> Any:
    process_group = SimpleNamespace(size=lambda: size)  # not registered with torch
    return SimpleNamespace(size=size, rank=0, process_group=process_group, tell_made=mock.Mock())


def report_of(*places: hang.Place, waits: bool = True) -> list[str]:
    """The report of ranks at these places. Unless ``waits``, only rank 0 waits."""
    store = dist.HashStore()
    posts = {}
    for rank, place in enumerate(places):
        store.set(f"tritonddp/hang/{rank}/stack", json.dumps([f"train.py:{rank} in main: line"]))
        posts[rank] = hang.Post([place], waits or rank == 0, f"process {rank}")
    return hang._Answers(fake_group(len(places)), store).report(posts)


def test_reports_if_no_rank_is_behind_or_ranks_wait_at_different_places() -> None:
    waiting = hang.Place(0, 7, 2, 1, "at the end of a backward", "bucket 1 ('a')")
    lines = report_of(waiting, waiting)
    assert lines[0] == "ranks 0 and 1, in step 7, at the end of a backward, for bucket 1 ('a')"
    assert "No rank is behind" in lines[1]
    assert "    train.py:1 in main: line" in lines

    later = hang.Place(0, 7, hang._ALL, hang._ALL, "outside forward and backward")
    lines = report_of(waiting, later, waits=False)
    assert "waits for no rank: in step 7, outside forward and backward" in lines[1]

    lines = report_of(waiting, waiting._replace(launched=1, back=0), waits=False)
    assert "is behind: in step 7" in lines[1]

    other = hang.Place(1, 7, 2, 0, "in a backward", "bucket 0 ('b')")
    inside = hang.Place(0, 6, hang._ALL, hang._ALL, "inside the backward of wrapped module 3")
    assert report_of(other, waiting, inside)[:3] == [
        "rank 1, in step 7, at the end of a backward, for bucket 1 ('a')",
        "rank 0, in step 7, in a backward, for bucket 0 ('b')",
        "rank 2, in step 6, inside the backward of wrapped module 3",
    ]


def test_posts_are_read_twice_before_a_report_and_a_failed_store_is_asked_once() -> None:
    own = hang.Post([hang.Place(0, 7, 2, 1, "")], True, "process 0")
    failed = mock.Mock(**{"set.side_effect": dist.DistStoreError})
    for store, found in (dist.HashStore(), ([], "rank 1 has not started")), (failed, (None, None)):
        watch = hang._GroupWatch(fake_group(), 1.0)
        with mock.patch.object(hang, "own_connection", lambda _, store=store: store):
            assert watch._ask(own) == found[0]
            assert str(found[1]) in str(watch._ask(own))
    assert failed.set.call_count == 1


@ranks(2)
def test_a_rank_inside_another_backward_says_so(rank: int, tmp_path: Path) -> None:
    other = dist.new_group()
    behind = "is behind: in step 1, inside the backward of wrapped module 0 of process group"
    with reports("1", tmp_path / "0", "rank 1 (process", behind):
        model = DistributedDataParallel(nn.Linear(2, 2))
        inner = DistributedDataParallel(nn.Linear(2, 2), process_group=other)
        model(torch.ones(1, 2)).sum().backward()
        if rank == 1:
            inner.module.weight.register_hook(lambda _: tokenize(tmp_path / "0"))
            with inner.no_sync():
                inner(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("ends", [True, False])
@ranks(2)
def test_a_rank_with_fewer_backwards_leaves_their_number(
    ends: bool, rank: int, tmp_path: Path
) -> None:
    """Its wrapper was deleted, or the rank runs other code."""
    gc.collect()
    group = dist.new_group()
    with seconds("1", TORCHELASTIC_USE_AGENT_STORE=str(ends)):
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        if rank == 0:
            while not store_of(group).check(["tritonddp/made/1"]):
                time.sleep(0.1)
            give_up_after(2, group)
            numbers = "rank 1 has run 1 fewer reduced backwards than this rank (2; this rank: 3)"
            with pytest.raises(RuntimeError, match=re.escape(numbers)):
                model(torch.ones(1, 2)).sum().backward()
        elif ends:
            del model
            gc.collect()
        dist.barrier()


@pytest.mark.long
def test_a_program_that_ends_early_leaves_the_number_of_its_backwards(tmp_path: Path) -> None:
    script = """
        import torch, torch.distributed as dist, tritonddp

        dist.init_process_group("gloo")
        model = tritonddp.DistributedDataParallel(torch.nn.Linear(2, 2))
        for step in range(4 - 2 * dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()
    """
    done = played(textwrap.dedent(script), tmp_path, nproc=2)
    numbers = "rank 1 has run 1 fewer reduced backwards than this rank (2; this rank: 3)"
    assert numbers in done.stderr


def test_without_a_thread_there_is_no_watch() -> None:
    wrapper: Any = mock.Mock(group=SimpleNamespace(size=2, rank=0, process_group=None))
    start = mock.patch.object(hang._Watch, "start", side_effect=RuntimeError("no more threads"))
    watch = mock.patch.object(hang, "_watch", None)
    with watch, seconds("1"), start, logged(logging.WARNING) as kept:
        hang.watch(wrapper)
    assert "hangs are not watched: no more threads" in kept.lines()[-1]
