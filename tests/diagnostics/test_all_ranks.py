"""The timelines of all ranks by one clock, and who of them is slow."""

import json
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from modules import linears

from tritonddp import DistributedDataParallel, trace
from tritonddp.coordination.processes import Process
from tritonddp.diagnostics.timeline import Backward, Timeline, lateness, slowest

SLEEP = 0.15  # seconds


def traced(slow: int | None, count: int = 3) -> Timeline:
    """Of some backwards, in which one rank sleeps."""
    module = linears(40, 50, 40, 3)
    if dist.get_rank() == slow:
        module[1].weight.register_hook(lambda _: time.sleep(SLEEP))
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.004)
    for _ in range(2):
        ddp(torch.ones(4, 40)).sum().backward()
    with trace(ddp) as timeline:
        for _ in range(count):
            loss = ddp(torch.ones(4, 40)).sum()
            dist.barrier()
            loss.backward()
    return timeline


@pytest.mark.parametrize("knows_hosts", [True, False])
@ranks(3)
def test_a_rank_that_sleeps_is_the_slowest_by_one_clock(rank: int, knows_hosts: bool) -> None:
    timeline = traced(slow=1)
    # Clocks that have nothing to do with each other, as those of several hosts.
    ahead = 0.0 if knows_hosts else 1000.0 * rank
    timeline.entered += ahead
    plain = time.perf_counter

    def clock() -> float:
        return plain() + ahead

    own = Process(1, "", f"kernel {0 if knows_hosts else rank}/pid", "host")
    with (
        mock.patch.object(time, "perf_counter", clock),
        mock.patch.object(Process, "own", return_value=own),
    ):
        everybody = timeline.gather()
    assert [each.rank for each in everybody] == [0, 1, 2]
    assert slowest(everybody) == 1
    mine, same = timeline.backwards, everybody[rank].backwards
    assert [len(each.buckets) for each in mine] == [len(each.buckets) for each in same]
    assert mine[0].seconds == pytest.approx(same[0].seconds)
    assert mine[0].buckets[0].parameters == same[0].buckets[0].parameters
    for passes in zip(*(each.backwards for each in everybody), strict=True):
        assert passes[1].compute_ended - passes[0].compute_ended > SLEEP / 2
        # No bucket is there before all ranks have sent it.
        for buckets in zip(*(each.buckets for each in passes), strict=True):
            launched = max(each.launched for each in buckets)
            assert min(each.completed for each in buckets) > launched - SLEEP / 3
    if rank == 0:
        assert same == mine
    assert len(set(gather(repr(everybody)))) == 1


@ranks(2)
def test_ranks_that_recorded_other_backwards_are_named(rank: int) -> None:
    timeline = traced(slow=None)
    if rank:
        del timeline.backwards[0]
    with pytest.raises(RuntimeError, match=r"gather\(\): rank 1 recorded other backwards than"):
        timeline.gather()


def test_what_was_not_traced_knows_of_no_rank() -> None:
    with pytest.raises(RuntimeError, match="a timeline that trace"):
        Timeline(0, "cpu").gather()


def backward(compute: float, **what: bool) -> Backward:
    flags = {"reduced": True, "first": False, "broken": False, **what}
    return Backward(0.0, compute, 2.0, gradients=(), buckets=(), **flags)


def test_the_slowest_is_later_than_the_next_by_a_share() -> None:
    def of(*computes: float) -> list[Timeline]:
        return [Timeline(rank, "cpu", [backward(each)]) for rank, each in enumerate(computes)]

    assert lateness([backward(1.5), backward(1.0)]) == [0.5, 0.0]
    assert slowest(of(1.0, 1.5)) == 1
    assert slowest(of(1.5, 1.0, 1.0)) == 0
    assert slowest(of(1.0, 1.09)) is None
    assert slowest(of(1.5, 1.5, 1.0)) is None  # two are
    assert slowest(of(1.0)) is None
    assert slowest([]) is None
    mixed = of(1.0, 1.5)
    mixed[0].backwards.insert(0, backward(9.0, reduced=False))
    mixed[1].backwards.insert(0, backward(1.0, reduced=False))
    assert slowest(mixed) == 1
    mixed[0].backwards[1] = replace(mixed[0].backwards[1], broken=True)
    assert slowest(mixed) is None


def test_a_chrome_trace_of_all_ranks_marks_the_slowest(tmp_path: Path) -> None:
    everybody = [Timeline(rank, "cpu", [backward(1.0 + rank)]) for rank in range(2)]
    everybody[0].save_chrome_trace(tmp_path / "all.json", everybody)
    everybody[0].save_chrome_trace(tmp_path / "one.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "rank 0, cpu", 2: "rank 1, cpu, the slowest"}
    assert sum(e.get("cat") == "backward" for e in events) == 2
    events = json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {1}
