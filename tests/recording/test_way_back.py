"""On a GPU gradients come back from their buckets while the last bucket is still on its way."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from distributed import ranks

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
