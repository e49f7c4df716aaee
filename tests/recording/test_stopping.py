"""On a GPU the host reads headers later: all ranks stop after the same step all the same."""

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP, Run
from recording.test_captured import running

# One more than on a CPU, since a header is read before the next reduction.
LATER = 1


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


@pytest.mark.parametrize("name", ["copies", "weights", "sparse"])
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


@pytest.mark.parametrize("asks_inside", [True, False], ids=["while", "before"])
@ranks(2, interprets=True)
def test_a_request_around_a_capture_is_for_the_next_step_without_one(
    rank: int, asks_inside: bool
) -> None:
    with running(PROGRAMS["copies"]) as run:
        for number in range(3):
            if number == 2 and rank == 0 and not asks_inside:
                run.net.request_stop()
            run.step()
        if not asks_inside:
            torch.cuda.synchronize()
        with run.recorder.graph():
            if rank == 0 and asks_inside:
                run.net.request_stop()
            run.step()
        assert not run.net.should_stop(), "a capture reduces nothing"
        run.step()
        if asks_inside:
            assert not run.net.should_stop(), "its headers are not read yet"
            run.step()
        assert run.net.should_stop()
