"""``metrics=True``: times of a step and its parts, over all ranks."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from modules import mlp
from torch import nn
from training import breaking_off

from tritonddp import DistributedDataParallel, _device
from tritonddp.features.metrics import EVERY, NAMES

PARTS = ("input", "forward", "backward")


@contextmanager
def time_of_test() -> Iterator[Any]:
    """Context: time passes only in ``sleep()``, slightly more than requested: all steps differ."""
    passed, generator = [0.0], random.Random(0)

    def sleep(seconds: float) -> None:
        passed.append(passed[-1] + seconds * generator.uniform(1.0, 1.0001))

    replaced = {"sleep": sleep, "perf_counter_ns": lambda: round(passed[-1] * 1e9)}
    clock = SimpleNamespace(**vars(time) | replaced)
    with mock.patch.object(_device, "time", clock):
        yield clock


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(30, 30, 3, activation=nn.ReLU)


def train(
    ddp: DistributedDataParallel, steps: int, sleep: Callable[[str], None] = lambda _: None
) -> list[Any]:
    found = []
    for _ in range(steps):
        sleep("input")
        outputs = ddp(torch.randn(8, 30).to(ddp.device))
        sleep("forward")
        outputs.register_hook(lambda grad: sleep("backward"))
        outputs.square().mean().backward()
        ddp.zero_grad()
        found.append(ddp.metrics())
    return found


@ranks(2, 3)
def test_all_ranks_know_the_slowest_rank_and_its_slow_part(rank: int) -> None:
    size = dist.get_world_size()
    for part in PARTS:
        ddp = DistributedDataParallel(net(), metrics=True)
        with time_of_test() as clock:
            early = train(ddp, EVERY, lambda _: clock.sleep(0.05))[-1]
            late = 0.1 * (rank == size - 1)

            def sleep(now: str, part: str = part, late: float = late) -> None:
                clock.sleep(0.05 + late * (now == part))

            found = train(ddp, EVERY + 1, sleep)[-1]
        assert early == {"step": EVERY, "slowest_rank": None} | {
            f"{name}_ms{kind}": None for name in NAMES for kind in ("", "_min", "_max")
        }
        assert found["slowest_rank"] == size - 1
        for name in PARTS:
            least, mean, most = (found[f"{name}_ms{kind}"] for kind in ("_min", "", "_max"))
            assert least == pytest.approx(50, rel=1e-3)
            assert mean == pytest.approx(50 + 100 / size * (name == part), rel=1e-3)
            assert most == pytest.approx(50 + 100 * (name == part), rel=1e-3)
        assert found["own_ms_max"] - found["own_ms_min"] == pytest.approx(100, rel=1e-2)
        assert found["step_ms"] == pytest.approx(found["own_ms"] + found["exposed_ms"])
        assert gather(found) == [found] * size


@ranks(2)
def test_accumulated_backwards_belong_to_the_step_that_reduces_them() -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    with time_of_test() as clock:
        train(ddp, EVERY)
        for _ in range(EVERY):
            with ddp.no_sync():
                for _ in range(3):
                    train(ddp, 1, lambda _: clock.sleep(0.04))
            train(ddp, 1, lambda _: clock.sleep(0.04))
        found = train(ddp, 1)[-1]
    assert found["step"] == 2 * EVERY + 1
    for part in PARTS:
        assert found[f"{part}_ms"] == pytest.approx(4 * 40, rel=1e-3)


@ranks(1)
def test_a_single_rank_has_its_local_times() -> None:
    with pytest.raises(RuntimeError, match=r"rank \d: metrics\(\) requires metrics=True"):
        DistributedDataParallel(net()).metrics()
    found = train(DistributedDataParallel(net(), metrics=True), EVERY)[-1]
    assert found["slowest_rank"] == 0


@ranks(2)
def test_a_failed_backward_does_not_count_as_a_step(rank: int) -> None:
    """The other rank gathers times in that step. The next collectives of the ranks match."""
    ddp = DistributedDataParallel(net(), metrics=True)
    train(ddp, EVERY - 1)
    loss = ddp(torch.randn(8, 30)).sum()
    with breaking_off(ddp.module[2].weight, rank == 1):
        loss.backward()
    found = train(ddp, EVERY + 1)[-1]
    assert found["step"] == 2 * EVERY + 1
    assert gather(found) == [found] * 2


@ranks(2)
def test_a_rank_without_inputs_times_no_step(rank: int) -> None:
    ddp = DistributedDataParallel(net(), metrics=True)
    with time_of_test() as time:
        with ddp.join():
            train(ddp, EVERY // 2 if rank else EVERY - 1, lambda _: time.sleep(0.05))
        time.sleep(10)
        found = train(ddp, 2, lambda _: time.sleep(0.05))[-1]
    assert (found["forward_ms_min"], found["forward_ms_max"]) == pytest.approx((50, 50), rel=1e-3)
