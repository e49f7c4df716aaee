"""On a GPU the host reads headers later: all ranks stop after the same step all the same."""

import random

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks
from training import breaking_off

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
            assert agreement.last_headers, "headers are steady again"


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
def test_the_steps_before_have_the_bits_and_the_launches_of_a_run_without_a_request() -> None:
    def play(asks: bool) -> tuple[list[torch.Tensor], list[tuple[object, ...]]]:
        with recording() as recorder:
            run, found = Run(PROGRAMS["copies"], recorder), []
            for number in range(WARM_UP + 4):
                if asks and number == WARM_UP and dist.get_rank() == 1:
                    run.net.request_stop()
                run.step()
                counts = recorder.launches
                found.append((counts["flatten"], counts["unflatten"], recorder.collectives))
            torch.cuda.synchronize()
            return run.gradients(), found[WARM_UP:]

    gradients, launches = play(asks=True)
    expected, without = play(asks=False)
    assert_same_bits(gradients, expected)
    assert launches == without


@pytest.mark.parametrize("asking", [0, 1])
@ranks(2, interprets=True)
def test_a_rank_whose_backward_broke_off_stops_with_the_others(rank: int, asking: int) -> None:
    with recording() as recorder:
        run = Run(PROGRAMS["copies"], recorder)
        for _ in range(WARM_UP):
            run.step()
        if rank == asking:
            run.net.request_stop()
        loss = run.net(run.x).sum()
        with breaking_off(run.module.second.weight, rank == 1):
            loss.backward()
        assert not run.net.should_stop()
        run.step()
        assert run.net.should_stop()
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
