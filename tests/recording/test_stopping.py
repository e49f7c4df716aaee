"""On a GPU the host reads headers later: all ranks stop after the same step all the same."""

import random

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP, Run

# One more than on a CPU, since a header is read before the next reduction.
LATER = 1
_QUICK = ("copies", "weights", "clipped", "sparse")


def programs() -> list[object]:
    marks = {name: pytest.mark.quick if name in _QUICK else pytest.mark.long for name in PROGRAMS}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def steps_to_stop(run: Run, asked_at: int, limit: int = 6) -> int:
    """Rank 1 asks before this step. ``should_stop()`` waits for nothing."""
    for number in range(asked_at + limit):
        if number == asked_at and dist.get_rank() == 1:
            run.net.request_stop()
        run.step()
        waits = len(run.recorder.waits)
        stops = run.net.should_stop()
        assert len(run.recorder.waits) == waits, "the host waits for the device"
        if stops:
            return number
    raise AssertionError("no rank stops")


@pytest.mark.parametrize("name", programs())
@ranks(2, interprets=True)
def test_all_ranks_stop_after_the_same_step(name: str) -> None:
    with recording() as recorder:
        run = Run(PROGRAMS[name], recorder)
        found = steps_to_stop(run, WARM_UP)
        assert gather(found) == [WARM_UP + LATER] * 2, name
        run.step()
        run.step()
        torch.cuda.synchronize()
        assert not recorder.races, recorder.report()
        agreement = run.net._ddp_state.core.agreement
        if "weights" not in name:
            agreement.check_pending()
            assert agreement.expected, "headers are steady again"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@ranks(3, interprets=True)
def test_a_rank_that_reads_earlier_stops_with_the_others(seed: int) -> None:
    """Some calls wait for the headers: on the rank that makes them, and on no other."""
    here, alike = random.Random(100 * seed + dist.get_rank()), random.Random(seed)
    with recording() as recorder:
        run = Run(PROGRAMS["copies"], recorder)
        for _ in range(WARM_UP):
            run.step()
        for _ in range(4):
            asked_at, asking = alike.randrange(3), alike.randrange(3)
            core = run.net._ddp_state.core
            for number in range(8):
                if number == asked_at and dist.get_rank() == asking:
                    run.net.request_stop()
                if here.random() < 0.5:
                    core.settle()
                run.step()
                if here.random() < 0.5:
                    core.settle()
                if run.net.should_stop():
                    break
            assert gather(number) == [asked_at + LATER] * 3
            run = Run(PROGRAMS["copies"], recorder)
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_a_request_while_a_graph_is_captured_is_for_the_next_step_without_one(rank: int) -> None:
    with recording() as recorder:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run = Run(PROGRAMS["copies"], recorder)
            for _ in range(3):
                run.step()
            with recorder.graph():
                if rank == 0:
                    run.net.request_stop()
                run.step()
                assert not run.net.should_stop()
            assert not run.net.should_stop()
            run.step()
            assert not run.net.should_stop(), "its headers are not read yet"
            run.step()
            assert run.net.should_stop()
        recorder.has_graph = False
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_a_request_that_was_read_before_a_capture_is_not_forgotten(rank: int) -> None:
    with recording() as recorder:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run = Run(PROGRAMS["copies"], recorder)
            for number in range(3):
                if number == 2 and rank == 0:
                    run.net.request_stop()
                run.step()
            torch.cuda.synchronize()
            with recorder.graph():
                run.step()
            assert not run.net.should_stop(), "a capture reduces nothing"
            run.step()
            assert run.net.should_stop()
        recorder.has_graph = False
        torch.cuda.synchronize()
