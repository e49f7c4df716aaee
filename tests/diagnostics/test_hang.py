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


@contextlib.contextmanager
def reports(limit: str, folder: Path) -> Iterator[Kept]:
    """Context: wrappers created inside report after ``limit`` seconds, and write files."""
    gc.collect()  # wrappers of other tests, whose groups were destroyed
    variables = {hang.SECONDS: limit, hang.DIRECTORY: str(folder)}
    with (
        mock.patch.dict(os.environ, variables),
        logged(logging.INFO, "tritonddp.diagnostics.hang") as kept,
    ):
        yield kept


def wait_for_report(folder: Path, rank: int, *texts: str) -> dict[str, Any]:
    """Wait until the file of this rank reports these texts, also on a busy machine."""
    while True:
        for file in folder.glob(f"*-rank{rank}.json"):
            with contextlib.suppress(json.JSONDecodeError):  # it is being written
                found = json.loads(file.read_text())
                if all(text in found["report"] for text in texts):
                    return found
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
    texts = place, "rank 1 (process", "in wait_for_report"
    with reports("1", tmp_path) as kept:
        model = DistributedDataParallel(nn.Linear(2, 2), transport=transport)
        for number in range(4):
            if number == 2 and rank == 1:
                for each in range(3):
                    wait_for_report(tmp_path, each, *texts)
            step(model, rank)
    found = [each for each in kept.records if all(text in each.getMessage() for text in texts)]
    report = found[0].getMessage()
    assert "for bucket 0" in report.splitlines()[0]
    assert "is behind: in step 2, outside forward and backward, at" in report
    assert re.search(rf"{re.escape(__file__)}:\d+ in wait_for_report: \w+", report)
    waited = [int(re.findall(r"for (\d+) s", each)[0]) for each in kept.lines() if place in each]
    assert all(b > 2 * a - 2 for a, b in itertools.pairwise(waited)), "at doubling intervals"
    levels = {each.levelno for each in found}
    assert levels == {logging.INFO if rank else logging.WARNING}, "once a host"


@ranks(3)
def test_a_store_that_does_not_respond_is_named(rank: int, tmp_path: Path) -> None:
    slow = mock.patch.object(hang, "own_connection", side_effect=lambda _: time.sleep(60))
    patience = mock.patch.multiple(hang, _PATIENCE=0.3, _NO_ANSWER=3.0)
    with slow, patience, reports("2", tmp_path):
        model = DistributedDataParallel(nn.Linear(2, 2))
        step(model, rank)
        if rank == 1:
            wait_for_report(tmp_path, 0, hang._NO_STORE)
        step(model, rank)


@pytest.mark.long
@ranks(2, interprets=True)
def test_the_thread_reports_while_the_host_waits_for_its_device(rank: int, tmp_path: Path) -> None:
    """As over NCCL, the host of rank 0 continues, and the collectives complete later."""
    late: list[Any] = []
    original = dist.Work.wait

    def defer(work: Any, *_: Any) -> None:
        late.append(partial(original, work))

    with reports("2", tmp_path) as kept, recording():
        model = DistributedDataParallel(nn.Linear(2, 2).cuda())
        inputs = torch.ones(1, 2, device="cuda")
        for _ in range(3):
            model(inputs).sum().backward()
        torch.cuda.synchronize()
        if rank == 1:
            wait_for_report(tmp_path, 0, "in wait_for_report")
        deferred = mock.patch.object(dist.Work, "wait", defer)
        with deferred if rank == 0 else contextlib.nullcontext():
            model(inputs).sum().backward()
        for wait in late:  # torch.cuda.synchronize()
            wait()
    if rank == 0:
        report = next(each for each in kept.records if "wait_for_report" in each.getMessage())
        assert report.threadName == "tritonddp-hang"
        where = "rank 0, in step 4, waiting for the device, for bucket 0"
        assert where in report.getMessage().splitlines()[0]


@ranks(2)
def test_a_rank_that_does_not_answer_and_one_that_still_wraps(rank: int, tmp_path: Path) -> None:
    silent = "does not respond: it is running: it has made progress recently, its store is slow, or"
    held = mock.patch.object(hang._GroupWatch, "look")
    with reports("1", tmp_path), held if rank == 0 else contextlib.nullcontext():
        if rank == 0:
            wait_for_report(tmp_path, 1, "rank 0 has not started to wrap a module")
        model = DistributedDataParallel(nn.Linear(2, 2))
        if rank == 0:
            found = wait_for_report(tmp_path, 1, "waiting for", silent)
            assert any(__file__ in line for each in found["stacks"].values() for line in each)
        model(torch.ones(1, 2)).sum().backward()


@ranks(2)
def test_a_rank_inside_another_backward_says_so(rank: int, tmp_path: Path) -> None:
    other = dist.new_group()
    behind = "is behind: in step 1, inside the backward of wrapped module 0 of process group"

    def wait(_: torch.Tensor) -> None:
        wait_for_report(tmp_path, 0, "rank 1 (process", behind)

    with reports("1", tmp_path):
        model = DistributedDataParallel(nn.Linear(2, 2))
        inner = DistributedDataParallel(nn.Linear(2, 2), process_group=other)
        model(torch.ones(1, 2)).sum().backward()
        if rank == 1:
            inner.module.weight.register_hook(wait)
            with inner.no_sync():
                inner(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()


NUMBERS = "rank 1 has run 1 fewer reduced backwards than this rank (2; this rank: 3)"


@ranks(2)
def test_a_rank_with_fewer_backwards_reports_their_number(rank: int, tmp_path: Path) -> None:
    group = dist.new_group()
    with reports("1", tmp_path):
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        if rank == 0:
            while not store_of(group).check(["tritonddp/made/1"]):
                time.sleep(0.1)
            give_up_after(2, group)
            with pytest.raises(RuntimeError, match=re.escape(NUMBERS)):
                model(torch.ones(1, 2)).sum().backward()
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
    assert NUMBERS in done.stderr


def test_a_wrong_number_of_seconds_is_an_error(tmp_path: Path) -> None:
    for text in "soon", "-1", "nan":
        with reports(text, tmp_path), pytest.raises(ValueError, match=f"{hang.SECONDS}.*{text!r}"):
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
