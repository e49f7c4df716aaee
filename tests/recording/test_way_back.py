"""On a GPU gradients come back from their buckets while the last bucket is still on its way."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from distributed import gather, ranks

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP, Run
from recording.recorder import Recorder
from tritonddp._device import Readback
from tritonddp.kernels.unflatten import JointUnflatten


class Given(NamedTuple):
    """What the current stream has been given, and how many collectives it does not wait for."""

    what: str
    buckets: int
    ahead_of: int


def noted(recorder: Recorder, found: list[Given]) -> Any:
    """Contexts: copies of headers and unflattens are noted in ``found``."""
    start, unflatten = Readback.start, JointUnflatten.__call__

    def note(what: str, buckets: int) -> None:
        nccl = next(each for each in recorder.streams if each.name.startswith("NCCL"))
        found.append(Given(what, buckets, nccl.now - recorder.current.clock.get(nccl, 0)))

    def started(self: Any, tensor: Any, *args: Any) -> None:
        note("headers", 0)
        start(self, tensor, *args)

    def unflattened(self: Any, grads: Any, *args: Any) -> None:
        note("unflatten", len(grads))
        unflatten(self, grads, *args)

    return (
        mock.patch.object(Readback, "start", started),
        mock.patch.object(JointUnflatten, "__call__", unflattened),
    )


@pytest.mark.parametrize("name", ["copies", "bf16 wire"])
@ranks(2, interprets=True)
def test_all_buckets_but_the_last_do_not_wait_for_it(name: str) -> None:
    found: list[Given] = []
    with recording() as recorder:
        run = Run(PROGRAMS[name], recorder)
        for _ in range(WARM_UP):
            run.step()
        buckets = len(run.net.reducer.buckets)
        assert buckets > 1
        one, other = noted(recorder, found)
        with one, other:
            run.step()
        torch.cuda.synchronize()
        assert not recorder.races, recorder.report()
    assert found == [
        Given("headers", 0, ahead_of=1),
        Given("unflatten", buckets - 1, ahead_of=1),
        Given("unflatten", 1, ahead_of=0),
    ]


@ranks(2, interprets=True)
def test_a_device_that_is_one_backward_behind_keeps_no_host_waiting() -> None:
    """Two reduced backwards in a step. Headers are there once the next ones are on their way."""
    with recording() as recorder:
        run = Run(PROGRAMS["copies"], recorder)
        for _ in range(WARM_UP):
            run.step()
        torch.cuda.synchronize()
        start = Readback.start

        def started(self: Any, *args: Any) -> None:
            recorder._reveal()
            start(self, *args)

        with mock.patch.object(Readback, "start", started):
            for _ in range(2):
                recorder.step_begins()
                for _ in range(2):
                    run.net.zero_grad()
                    run.net(run.x).sum().backward()
                assert not recorder.waits, recorder.waits
        torch.cuda.synchronize()
        assert not recorder.races, recorder.report()


@ranks(2, interprets=True)
def test_a_rank_that_adds_a_parameter_alone_makes_the_next_backward_as_before(rank: int) -> None:
    """It has other parameters than the others: all find that at the end of the next backward."""
    with recording():
        run = Run(PROGRAMS["copies"], Recorder())
        for _ in range(WARM_UP):
            run.step()
        core = run.net._ddp_state.core
        if rank == 0:
            run.module.third.register_parameter(
                "more", torch.nn.Parameter(torch.ones(2).to("cuda"))
            )
            run.module.third.register_forward_hook(lambda layer, _, y: y * layer.more.sum())
        if rank:
            run.step()  # its first bucket meets the question of the other rank
        step = core.counters.reductions + (rank == 0)
        with pytest.raises(RuntimeError, match=rf"(?s)rank {rank}, step {step}.*third\.more"):
            run.step()
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_weights_are_divided_by_a_unit_that_is_alike(rank: int) -> None:
    """Whichever rank looks at the headers early."""
    with recording() as recorder:
        run, units = Run(PROGRAMS["copies"], recorder), []
        for number in range(6):
            with run.net.weighted(4.0 ** (number + rank)):
                run.step()
            if rank == number % 2:
                run.net._ddp_state.core.flush()
            units.append(run.net._ddp_state.core.reducer.weights.unit)
        assert len(set(units)) > 3
        assert gather(units) == [units] * 2
        torch.cuda.synchronize()
