"""On a GPU the host reads headers later, and all ranks still stop after the same step."""

import pytest
import torch
from distributed import gather, ranks

from recording.programs import PROGRAMS, WARM_UP, running

# One step later than on a CPU, since a header is read before the next reduction.
LATER = 1


@pytest.mark.parametrize("name", ["copies", "weights", "sparse"])
@ranks(2, interprets=True)
def test_all_ranks_stop_after_the_same_step(rank: int, name: str) -> None:
    with running(PROGRAMS[name], WARM_UP) as run:
        if rank == 1:
            run.net.request_stop()
        stops = []
        for _ in range(LATER + 1):
            run.step()
            waits = len(run.recorder.waits)
            stops.append(run.net.should_stop())
            assert len(run.recorder.waits) == waits, "the host waits for the device"
        assert gather(stops) == [[False] * LATER + [True]] * 2
        run.step(2)
        agreement = run.net._ddp_state.core.agreement
        if name != "weights":
            agreement.check_pending()
            assert agreement.expected, "headers are steady again"


@pytest.mark.parametrize("asks_inside", [True, False], ids=["while", "before"])
@ranks(2, interprets=True)
def test_a_capture_leaves_a_request_to_the_next_step(rank: int, asks_inside: bool) -> None:
    with running(PROGRAMS["copies"], 2, is_on_side=True) as run:
        if rank == 0 and not asks_inside:
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
