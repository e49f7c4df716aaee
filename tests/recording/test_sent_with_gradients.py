"""On a GPU scalars and requests to stop are sent with the gradients, and the host does not wait."""

import math
from dataclasses import replace

import pytest
from distributed import gather, ranks

from recording.programs import PROGRAMS, WARM_UP, Run, running

STEPS = 4


def assert_reduced(run: Run) -> None:
    found = run.net.reduced_scalars()
    losses = gather(run.x.sum().double().item())
    total = math.fsum(losses)
    assert found["loss"].sum.device.type == "cuda"
    assert found["loss"].sum.item() == total
    assert found["loss"].mean.item() == total / len(losses)
    assert found["tokens"].sum.item() == len(run.x) * len(losses)


@pytest.mark.parametrize("name", ["copies", "int8", "lazy buckets"])
@ranks(2, interprets=True)
def test_scalars_add_no_wait_and_no_collective(name: str) -> None:
    plain, scalars = PROGRAMS[name], PROGRAMS["scalars"]
    options = {**plain.options, **scalars.options}
    counted = []
    for program in (plain, replace(plain, options=options, before=scalars.before)):
        with running(program, STEPS) as run:
            # Both wait for the headers of the previous step.
            waits = [wait.place for wait in run.recorder.waits if not wait.age]
            counted.append((waits, run.recorder.collectives))
            if program is not plain:
                assert_reduced(run)
    assert counted[0] == counted[1]


@ranks(2, interprets=True)
def test_all_ranks_stop_after_the_same_step(rank: int) -> None:
    """One step later than on a CPU, because a header is read before the next reduction."""
    with running(PROGRAMS["copies"], WARM_UP) as run:
        if rank == 1:
            run.net.request_stop()
        stops = []
        for _ in range(2):
            run.step()
            waits = len(run.recorder.waits)
            stops.append(run.net.should_stop())
            assert len(run.recorder.waits) == waits, "the host waits for the device"
        assert gather(stops) == [[False, True]] * 2


@ranks(2, interprets=True)
def test_a_stop_that_is_requested_during_a_capture_is_sent_with_the_next_step(rank: int) -> None:
    with running(PROGRAMS["copies"], 3, is_on_side=True) as run:
        with run.recorder.graph():
            if rank == 0:
                run.net.request_stop()
            run.step()
        assert not run.net.should_stop(), "a capture reduces nothing"
        run.step()
        assert not run.net.should_stop(), "the headers of this step have not been read"
        run.step()
        assert run.net.should_stop()
