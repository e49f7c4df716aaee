"""On a GPU scalars and requests to stop are sent with the gradients, and the host does not wait."""

import math
from dataclasses import replace

import pytest
import torch
from distributed import gather, ranks

from recording.programs import PROGRAMS, WARM_UP, Run, running

STEPS = 4
# Ranks stop one step later than on a CPU, since a header is read before the next reduction.
LATER = 1


def assert_reduced(run: Run) -> None:
    found = run.net.reduced_scalars()
    losses = gather(run.x.sum().double().item())
    total = math.fsum(losses)
    assert found["loss"].sum.device.type == "cuda"
    assert found["loss"].sum.item() == total
    assert found["loss"].mean.item() == total / len(losses)
    assert found["tokens"].sum.item() == len(run.x) * len(losses)


@pytest.mark.parametrize(
    "name", ["copies", "views", "bf16 wire", "int8", "lazy buckets", "sparse", "complex"]
)
@ranks(2, interprets=True)
def test_scalars_add_no_wait_and_no_collective(name: str) -> None:
    plain, scalars = PROGRAMS[name], PROGRAMS["scalars"]
    options = {**plain.options, **scalars.options}
    counted = []
    for program in (plain, replace(plain, options=options, before=scalars.before)):
        with running(program, STEPS) as run:
            # Both wait for the headers of the step before.
            waits = [wait.place for wait in run.recorder.waits if not wait.age]
            counted.append((waits, run.recorder.collectives))
            if program is not plain:
                assert_reduced(run)
    assert counted[0] == counted[1]


@ranks(2, interprets=True)
def test_the_loss_may_be_computed_on_another_stream() -> None:
    program = replace(PROGRAMS["copies"], options=PROGRAMS["scalars"].options)
    with running(program) as run:
        side = torch.cuda.Stream()
        run.x  # noqa: B018
        for _ in range(STEPS):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run.net.add_scalars(loss=run.x.sum(), tokens=len(run.x))
            run.step()
        assert_reduced(run)


@ranks(2, interprets=True)
def test_the_next_backward_names_a_rank_that_has_added_no_scalars(rank: int) -> None:
    with running(PROGRAMS["scalars"], 1, is_on_side=True) as run:
        torch.cuda.synchronize()
        silent = replace(run.program, before=lambda net, x: None)
        (silent if rank else run.program).step(run.net, run.x)
        with pytest.raises(RuntimeError, match="rank 0: 'loss', 'tokens'; rank 1: none"):
            run.step()
        run.step()
        assert_reduced(run)


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
