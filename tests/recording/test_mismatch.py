"""On a GPU the host reads headers later: all ranks raise at the same place, and none hangs."""

import contextlib
from typing import Any

import pytest
import torch
from distributed import gather, ranks
from torch import nn

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP, Program, Run, running
from recording.recorder import Recorder


@contextlib.contextmanager
def warmed_up(program: Program) -> Any:
    """Context: a program that is about to fail, so its order does not matter."""
    with recording():
        run = Run(program, Recorder())
        run.step(WARM_UP)
        yield run
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("what", "message"),
    [("weighted", "only some ranks use a weighted mean"), ("frozen", "third.weight")],
)
@ranks(2, interprets=True)
def test_a_step_that_one_rank_makes_differently_is_an_error_in_the_next(
    rank: int, what: str, message: str
) -> None:
    """Only its header differs. The broadcast of the buffers in the next forward needs all ranks."""
    with warmed_up(PROGRAMS["buffers"]) as run:
        if rank == 0 and what == "frozen":
            run.module.third.requires_grad_(False)
        is_weighted = rank == 0 and what == "weighted"
        with run.net.weighted(2) if is_weighted else contextlib.nullcontext():
            run.step()
        output = run.net(run.x)
        with pytest.raises(RuntimeError, match=message):
            output.sum().backward()


@ranks(2, interprets=True)
def test_an_extra_backward_of_one_rank_is_an_error_on_both_in_the_next_backward(rank: int) -> None:
    """Of a module that is replicated in place."""
    with warmed_up(PROGRAMS["in place"]) as run:
        if rank == 0:
            run.module(run.x[:2]).max(1).values.sum().backward()
        else:
            run.step()
        with pytest.raises(RuntimeError, match=r"option 'backward\(\)': rank 0 has 'called in"):
            run.step()


@pytest.mark.parametrize(
    ("freezes", "message"),
    [
        (False, "the ranks have diverged: rank 0: reduce_gradients"),
        (True, r"option 'reduction': rank 0 has 'on request"),
    ],
    ids=["same parameters", "one is frozen"],
)
@ranks(2, interprets=True)
def test_a_request_of_one_rank_and_a_backward_of_the_other(
    rank: int, freezes: bool, message: str
) -> None:
    """Both ranks find it at the end of their next reduction, again a request and a backward."""
    with warmed_up(PROGRAMS["copies"]) as run:

        def reduce_here_or_there() -> None:
            with contextlib.nullcontext() if rank else run.net.no_sync():
                run.step()
            if rank == 0:
                run.net.reduce_gradients()

        if freezes and rank:
            run.module.third.requires_grad_(False)
        reduce_here_or_there()
        with pytest.raises(RuntimeError, match=rf"(?s)rank {rank}, step.*{message}"):
            reduce_here_or_there()
        torch.cuda.synchronize()
        run.module.third.requires_grad_(True)
        run.step()
        run.net.check_sync()


@ranks(2, interprets=True)
def test_a_parameter_that_one_rank_adds_is_an_error_at_the_end_of_the_next_backward(
    rank: int,
) -> None:
    with warmed_up(PROGRAMS["copies"]) as run:
        core = run.net._ddp_state.core
        if rank == 0:
            more = nn.Parameter(torch.ones(2).to("cuda"))
            run.module.third.register_parameter("more", more)
            run.module.third.register_forward_hook(lambda layer, _, y: y * layer.more.sum())
        else:
            run.step()  # its first bucket meets the question of rank 0
        step = core.counters.reductions + (rank == 0)
        with pytest.raises(RuntimeError, match=rf"(?s)rank {rank}, step {step}.*third\.more"):
            run.step()


@ranks(2, interprets=True)
def test_ranks_divide_weights_by_the_same_unit_whichever_rank_reads_headers_early(
    rank: int,
) -> None:
    units = []
    with running(PROGRAMS["copies"]) as run:
        for number in range(6):
            with run.net.weighted(4.0 ** (number + rank)):
                run.step()
            if rank == number % 2:
                run.net._ddp_state.core.flush()
            units.append(run.net._ddp_state.core.reducer.weights.unit)
    assert gather(units) == [units] * 2
    assert len(set(units)) > 3
