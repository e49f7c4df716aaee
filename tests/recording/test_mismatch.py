"""Ranks that disagree, on a GPU, where the host reads headers later than on a CPU."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from distributed import gather, ranks
from torch import nn

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP, Run, running


@contextlib.contextmanager
def warm(name: str) -> Iterator[Run]:
    """Context: a program after some steps. Accesses after an error need no order."""
    with recording():
        run = Run(PROGRAMS[name])
        run.step(WARM_UP)
        yield run
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_a_parameter_that_one_rank_freezes_is_named_in_the_next_backward(rank: int) -> None:
    """Both ranks still take part in the broadcast of the buffers before that."""
    with warm("buffers") as run:
        if rank == 0:
            run.module.third.requires_grad_(False)
        run.step()
        output = run.net(run.x)
        with pytest.raises(RuntimeError, match=r"third\.weight"):
            output.sum().backward()


@ranks(2, interprets=True)
def test_a_parameter_that_one_rank_adds_is_named_at_the_end_of_the_next_backward(rank: int) -> None:
    with warm("copies") as run:
        if rank == 0:
            more = nn.Parameter(torch.ones(2).to("cuda"))
            run.module.third.register_parameter("more", more)
            run.module.third.register_forward_hook(lambda layer, _, y: y * layer.more.sum())
        else:
            run.step()  # its first bucket meets the question of rank 0
        with pytest.raises(RuntimeError, match=rf"(?s)rank {rank}, step \d+.*third\.more"):
            run.step()


@ranks(2, interprets=True)
def test_reduce_gradients_on_one_rank_and_a_backward_on_the_other(rank: int) -> None:
    """Both ranks raise at the end of their next reduction."""
    with warm("copies") as run:

        def reduce() -> None:
            with contextlib.nullcontext() if rank else run.net.no_sync():
                run.step()
            if rank == 0:
                run.net.reduce_gradients()

        reduce()
        message = "the ranks have diverged: rank 0: reduce_gradients"
        with pytest.raises(RuntimeError, match=rf"(?s)rank {rank}, step.*{message}"):
            reduce()
        torch.cuda.synchronize()
        run.step()
        run.net.check_sync()


@ranks(2, interprets=True)
def test_ranks_divide_weights_by_the_same_unit_if_they_read_headers_at_different_times(
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
