"""``metrics=True``: who is slow, in which part of a step, and what everybody may read of it."""

import contextlib
import io
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from clock import time_of_test
from distributed import gather, ranks
from logged import logged
from modules import mlp
from torch import nn
from training import breaking_off

from tritonddp import DistributedDataParallel
from tritonddp.features.metrics import step_times
from tritonddp.features.metrics.metrics import _is_measured
from tritonddp.features.metrics.step_times import RunQueue, StepClock, StepTimes
from tritonddp.features.metrics.stragglers import PARTS, Stragglers

PART_OF_STEP = [4.0, 8.0, 14.0]  # ms, of input, forward and backward


def noisy(rng: random.Random, noise: float, size: int) -> list[list[float]]:
    """The times of a step on each rank."""
    return [[each * (1 + rng.gauss(0, noise)) for each in PART_OF_STEP] for _ in range(size)]


def step_of(own: list[list[float]]) -> list[StepTimes]:
    """All ranks wait for the last one."""
    most = max(map(sum, own))
    return [StepTimes(*each, exposed=1 + most - sum(each)) for each in own]


@pytest.mark.parametrize("noise", [0.002, 0.02, 0.3])
@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_even_ranks_are_never_named(size: int, noise: float) -> None:
    rng, stragglers = random.Random(size), Stragglers(size)
    for _ in range(1000):
        assert stragglers.step(step_of(noisy(rng, noise, size))) is None


@pytest.mark.parametrize("share", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("part", range(len(PARTS)), ids=PARTS)
@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_a_slow_rank_is_named_in_three_steps_with_its_part(
    size: int, part: int, share: float
) -> None:
    rng, stragglers = random.Random(part), Stragglers(size)
    slow = rng.randrange(size)
    for _ in range(20):
        stragglers.step(step_of(noisy(rng, 0.002, size)))
    found: list[Any] = []
    for _ in range(30):
        own = noisy(rng, 0.002, size)
        own[slow][part] += share * sum(PART_OF_STEP)
        found.append(stragglers.step(step_of(own)))
    assert found[1] is None  # two steps are an accident
    assert all(each[:2] == (slow, PARTS[part]) for each in found[2:])
    assert found[-1].share == pytest.approx(share / (1 + share), rel=0.15)
    for _ in range(3):
        stragglers.step(step_of(noisy(rng, 0.002, size)))
    assert stragglers.slowest is None


@pytest.mark.parametrize("long_steps", [(), (47,), range(0, 400, 50)], ids=["", "one", "some"])
def test_in_short_steps_less_than_half_a_millisecond_is_chance(long_steps: Sequence[int]) -> None:
    """A fifth of the step, always of the same rank; after 200 steps a half of it, for a while."""
    rng, stragglers = random.Random(0), Stragglers(2)
    for step in range(400):
        is_late = 200 <= step < 220
        own = [[each / 20 for each in rank] for rank in noisy(rng, 0.002, 2)]
        own[1][1] += (0.26 + 0.44 * is_late) * (step >= 20)
        if step in long_steps:
            own = [[5.0, 8.0, 487.0]] * 2
        found = stragglers.step(step_of(own))
        if is_late and step >= 210:
            assert found[:2] == (1, "forward")
        elif not 200 <= step < 224:
            assert found is None, step


def test_another_rank_that_is_slower_takes_the_place() -> None:
    rng, stragglers = random.Random(0), Stragglers(4)
    for step in range(40):
        own = noisy(rng, 0.002, 4)
        own[1][0] += 5.0 * (step >= 10)
        own[3][2] += 15.0 * (step >= 20)
        stragglers.step(step_of(own))
        if step == 15:
            assert stragglers.slowest[:2] == (1, "input")
    assert stragglers.slowest[:2] == (3, "backward")


@pytest.mark.parametrize(("share", "least", "most"), [(0.1, 9, 13), (0.6, 3, 3)])
def test_a_core_that_is_slower_for_some_steps_is_not_a_slow_rank(
    share: float, least: int, most: int
) -> None:
    """It takes more steps than where the rank is idle, unless it is much slower."""
    rng, stragglers = random.Random(0), Stragglers(2)
    for _ in range(19):
        stragglers.step(step_of(noisy(rng, 0.002, 2)))
    for number in range(1, most + 5):
        own = noisy(rng, 0.002, 2)
        own[1][1] += share * sum(PART_OF_STEP)
        times = step_of(own)
        found = stragglers.step([each._replace(busy=each.own) for each in times])
        assert found is None or number >= least
        assert found is not None or number < most


def test_one_slow_step_in_ten_is_not_a_slow_rank() -> None:
    rng, stragglers = random.Random(0), Stragglers(2)
    for step in range(500):
        own = noisy(rng, 0.01, 2)
        own[0][0] += 50.0 * (step % 10 == 0)
        assert stragglers.step(step_of(own)) is None


def test_parts_of_a_step_add_up_to_it() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.lap(1)
    begin = time.perf_counter()
    assert clock.end_step(True) is None  # its begin was not seen
    first = time.perf_counter()
    for part, seconds in ((1, 0.01), (2, 0.02), (3, 0.03)):
        time.sleep(seconds)
        clock.lap(part)
    last = time.perf_counter()
    times = clock.end_step(False, 3.0)
    end = time.perf_counter()
    assert 1e3 * (last - first) <= times.total <= 1e3 * (end - begin)
    assert times.items == 3
    assert times.input >= 9.9
    assert times.forward >= 19.9
    assert times.backward >= 29.9


def test_sleep_is_no_waiting_for_a_core_and_a_shared_core_is() -> None:
    queue, waited = RunQueue(), []
    for _ in range(5):  # the machine may be busy, and let this thread wait after a sleep
        before = queue.seconds()
        time.sleep(0.05)
        waited.append(queue.seconds() - before)
    assert min(waited) < 0.045
    if not Path("/proc/self/schedstat").exists():
        return
    here = os.sched_getaffinity(0)
    busy = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", busy])
    try:
        core = {min(here)}
        os.sched_setaffinity(other.pid, core)
        os.sched_setaffinity(0, core)
        time.sleep(0.3)
        before, begin = queue.seconds(), time.perf_counter()
        while time.perf_counter() - begin < 0.5:
            pass
        assert queue.seconds() - before > 0.1
    finally:
        os.sched_setaffinity(0, here)
        other.kill()
        other.wait()


def test_each_thread_has_its_own_queue_and_its_file_is_closed() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    before = files()
    queue = RunQueue()
    found = [queue.seconds()]
    thread = threading.Thread(target=lambda queue=queue: found.append(queue.seconds()))
    thread.start()
    thread.join()
    found.append(queue.seconds())
    pairs = pairwise(found)
    assert all(later >= one - 1e-9 for one, later in pairs)  # sums of floats
    del queue
    assert files() == before


def test_a_thread_that_has_the_number_of_one_that_has_ended() -> None:
    queue, found = RunQueue(), list[float]()

    def ask() -> None:
        # Linux tells nothing of a thread that has ended. The next one mostly gets its number.
        with mock.patch.object(step_times, "threading", mock.Mock(wraps=threading)) as seen:
            seen.get_ident = lambda: 1
            found.append(queue.seconds())

    for _ in range(3):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert found == sorted(found)
    assert len(found) == 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(30, 30, 3, activation=nn.ReLU)


def train(ddp: DistributedDataParallel, steps: int, sleep: Callable[[str], None]) -> list[Any]:
    found = []
    for _ in range(steps):
        sleep("input")
        outputs = ddp(torch.randn(8, 30))
        sleep("forward")
        outputs.register_hook(lambda grad: sleep("backward"))
        outputs.square().mean().backward()
        ddp.zero_grad()
        found.append(ddp.metrics())
    return found


@pytest.mark.parametrize("part", PARTS)
@ranks(2, 3)
def test_the_slow_rank_is_named_on_all_ranks(rank: int, part: str) -> None:
    size = dist.get_world_size()
    slow = size - 1
    ddp = DistributedDataParallel(net(), metrics=True)
    with time_of_test() as time:
        train(ddp, 12, lambda _: time.sleep(0.05))
        late = 0.1 * (rank == slow)
        found = train(ddp, 12, lambda now: time.sleep(0.05 + late * (now == part)))[-1]
        even = train(ddp, 8, lambda _: time.sleep(0.05))[-1]
    assert (found["slowest_rank"], found["slowest_phase"]) == (slow, part)
    assert found["slowest_by"] == pytest.approx(10 / (15 + 10 / size), rel=1e-3)
    assert found["skew_ms"] == pytest.approx(100, rel=1e-3)
    del found["sent_bytes"]
    assert gather(found) == [found] * size
    parts = ("input", "forward", "backward", "exposed", "contended")
    assert found["step_ms"] == pytest.approx(sum(found[f"{each}_ms"] for each in parts))
    assert even["slowest_rank"] is None


@ranks(2)
def test_of_short_steps_one_in_so_many_is_measured(rank: int) -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    agreement = ddp._ddp_state.core.agreement
    read = mock.Mock(wraps=agreement.read)
    with time_of_test() as time, mock.patch.object(agreement, "read", read):
        train(ddp, 40, lambda _: time.sleep(0.001))
        read.reset_mock()
        found = train(ddp, 100, lambda _: time.sleep(0.001))
        # 0.3 ms is half a percent of 20 steps of 3 ms. (No two steps take exactly as long.)
        assert len({each["step_ms"] for each in found}) in (3, 4)
        assert read.call_count in (3, 4)  # in the others the ranks repeat what they said
        slow = train(
            ddp, 120, lambda part: time.sleep(0.001 + 0.003 * (part == "forward" and rank))
        )
        train(ddp, 70, lambda _: time.sleep(0.1))  # until one of these has been measured
        found = train(ddp, 20, lambda _: time.sleep(0.1))
    assert (slow[-1]["slowest_rank"], slow[-1]["slowest_phase"]) == (1, "forward")
    assert len({each["step_ms"] for each in found}) == 20


@ranks(2)
def test_it_is_said_once_by_rank_0(rank: int) -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    with logged(logging.INFO, "tritonddp.metrics") as said, time_of_test() as time:
        train(ddp, 10, lambda _: time.sleep(0.04))
        train(ddp, 15, lambda part: time.sleep(0.04 + 0.2 * (part == "forward" and rank)))
        train(ddp, 8, lambda _: time.sleep(0.04))
    texts = said.lines()
    expected = [logging.WARNING, logging.INFO] if rank == 0 else []
    assert [record.levelno for record in said.records] == expected, texts
    if rank == 0:
        assert "rank 1 is slow: its forward takes" in texts[0]
        assert texts[0].startswith("rank 0, step ")
        assert "no rank is slower than the others any more" in texts[1]


@ranks(2)
def test_shares_of_a_batch_are_in_proportion_to_the_speed(rank: int) -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    with pytest.raises(RuntimeError, match="speeds of the ranks are not known yet"):
        ddp.suggested_shares()
    # Rank 1 takes three times as long for an item, and has half as many.
    with time_of_test() as time:
        for _ in range(30):
            with ddp.weighted(4 / (1 + rank)):
                outputs = ddp(torch.randn(8, 30))
                time.sleep(0.02 * (1.0, 1.5)[rank])
                outputs.square().mean().backward()
    shares = ddp.suggested_shares()
    assert shares == pytest.approx([0.75, 0.25], rel=1e-3)
    assert gather(shares) == [shares] * 2


@ranks(2)
def test_accumulated_backwards_belong_to_the_step_that_reduces_them() -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    with time_of_test() as time:
        train(ddp, 3, lambda _: None)
        for _ in range(3):
            with ddp.no_sync():
                for _ in range(3):
                    train(ddp, 1, lambda _: time.sleep(0.04))
            train(ddp, 1, lambda _: time.sleep(0.04))
        found = train(ddp, 1, lambda _: None)[-1]
    assert found["step"] == 7
    for part in PARTS:
        assert found[f"{part}_ms"] == pytest.approx(4 * 40, rel=1e-3)


@ranks(2)
def test_a_line_in_so_many_steps(rank: int) -> None:
    lines: list[str] = []
    ddp = DistributedDataParallel(net(), metrics=True)
    ddp.log_metrics(every=2, write=lines.append)
    train(ddp, 6, lambda _: None)
    assert len(lines) == (3 if rank == 0 else 0)
    assert all(line.startswith(f"step {2 * n}: ") for n, line in enumerate(lines, start=1))
    ddp.log_metrics(every=1)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        train(ddp, 1, lambda _: None)
    assert ("step 7: " in printed.getvalue()) == (rank == 0)
    for wrong in (0, -1, 1.5, True, "often"):
        with pytest.raises(ValueError, match="every should be"):
            ddp.log_metrics(every=wrong)  # type: ignore[arg-type]


@ranks(2)
def test_without_the_option_its_methods_say_so() -> None:
    ddp = DistributedDataParallel(net())
    for method in (ddp.metrics, ddp.suggested_shares, ddp.log_metrics):
        with pytest.raises(RuntimeError, match=r"rank \d: .*\(\) needs metrics=True"):
            method()


@ranks(2)
def test_waiting_for_a_late_rank_is_no_time_of_ones_own(rank: int) -> None:
    """By the clock of the machine, which may take as long as it likes."""
    ddp = DistributedDataParallel(net(), metrics=True)
    train(ddp, 2, lambda _: None)
    found = train(ddp, 3, lambda part: time.sleep(0.2 * (part == "forward" and rank)))[-1]
    assert found["exposed_ms"] > 50  # the mean of 0 and 200
    assert found["forward_ms"] > 99


@ranks(1)
def test_alone_a_rank_has_its_own_times() -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    found = train(ddp, 4, lambda _: time.sleep(0.002))[-1]
    assert found["forward_ms"] >= 2
    assert found["slowest_rank"] is None
    assert ddp.suggested_shares() == [1.0]


@ranks(2)
def test_a_backward_that_breaks_off_is_no_step() -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    with time_of_test() as time:
        train(ddp, 4, lambda _: time.sleep(0.1))
        outputs = ddp(torch.randn(8, 30))
        with breaking_off(ddp.module[2].weight):
            outputs.sum().backward()
        time.sleep(5)
        found = [each["input_ms"] for each in train(ddp, 4, lambda _: time.sleep(0.1))]
    assert found == pytest.approx([100] * 4, rel=1e-3)
    assert len(set(found)) > 1  # steps are measured again


@ranks(2)
def test_a_backward_that_breaks_off_on_one_rank_is_counted_on_all(rank: int) -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    outputs = ddp(torch.randn(8, 30))
    with breaking_off(ddp.module[2].weight, rank == 1):
        outputs.sum().backward()
    ddp.zero_grad()
    (found,) = train(ddp, 1, lambda _: None)
    assert found["step"] == 2


@pytest.mark.parametrize("bits", range(6))
def test_measured_steps_are_spread_over_whatever_a_program_repeats(bits: int) -> None:
    """One step of each block, and of every second, third, .. step of a program its part."""
    count = 1 << bits
    measured = [step for step in range(count * 4000) if _is_measured(step, bits)]
    assert [step // count for step in measured] == list(range(4000))
    for every in (2, 3, 4, 5, 8, 10):
        for phase in range(every):
            met = sum(step % every == phase for step in measured)
            assert met == pytest.approx(4000 / every, rel=0.1)
