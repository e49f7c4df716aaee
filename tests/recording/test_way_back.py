"""On a GPU gradients are unpacked while the last bucket is still being sent."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from distributed import ranks

from recording.programs import PROGRAMS, WARM_UP, running
from tritonddp._device import Readback
from tritonddp.kernels.unflatten import JointUnflatten


class Launched(NamedTuple):
    """What the current stream was given, and how many collectives it does not wait for."""

    what: str
    buckets: int
    ahead_of: int


@pytest.mark.parametrize("name", ["copies", "bf16 wire"])
@ranks(2, interprets=True)
def test_all_buckets_but_the_last_are_unpacked_before_it_arrives(name: str) -> None:
    found: list[Launched] = []
    with running(PROGRAMS[name], WARM_UP) as run:
        buckets, recorder = len(run.net.reducer.buckets), run.recorder
        nccl = next(each for each in recorder.streams if each.name.startswith("NCCL"))
        start, unflatten = Readback.start, JointUnflatten.__call__

        def note(what: str, buckets: int) -> None:
            ahead_of = nccl.now - recorder.current.clock.get(nccl, 0)
            found.append(Launched(what, buckets, ahead_of))

        def started(self: Any, *args: Any) -> None:
            note("headers", 0)
            start(self, *args)

        def unflattened(self: Any, grads: Any, *args: Any) -> None:
            note("unflatten", len(grads))
            unflatten(self, grads, *args)

        with (
            mock.patch.object(Readback, "start", started),
            mock.patch.object(JointUnflatten, "__call__", unflattened),
        ):
            run.step()
    assert buckets > 1
    assert found == [
        Launched("headers", 0, ahead_of=1),
        Launched("unflatten", buckets - 1, ahead_of=1),
        Launched("unflatten", 1, ahead_of=0),
    ]


@ranks(2, interprets=True)
def test_a_device_that_is_one_backward_behind_does_not_keep_the_host_waiting() -> None:
    """Of two reduced backwards in a step. The next headers are sent when the last ones arrive."""
    with running(PROGRAMS["copies"], WARM_UP) as run:
        torch.cuda.synchronize()
        start = Readback.start

        def started(self: Any, *args: Any) -> None:
            run.recorder._reveal()
            start(self, *args)

        with mock.patch.object(Readback, "start", started):
            for _ in range(2):
                run.recorder.step_begins()
                for _ in range(2):
                    run.net.zero_grad()
                    run.net(run.x).sum().backward()
                assert not run.recorder.waits, run.recorder.waits
