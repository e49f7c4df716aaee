"""Two levels over NCCL: quantised between hosts of several GPUs, on the recorded device."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from torch import Tensor

from recording.device import recording
from recording.programs import PROGRAMS, Program, Run
from tritonddp.buckets.wire_formats import QuantizedFormat, QuantizedInterHost
from tritonddp.coordination import hosts

STEPS = 6


@contextmanager
def on_hosts(size: int) -> Iterator[None]:
    """Context: ranks are on hosts of so many ranks each."""
    name = f"host {dist.get_rank() // size}"
    with mock.patch.object(hosts, "_host", return_value=name):
        yield


def gradients(run: Run) -> Tensor:
    grads = [param.grad for param in run.module.parameters()]
    return torch.cat([grad.detach().cpu().flatten() for grad in grads if grad is not None])


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.long)])
@ranks(4, interprets=True)
def test_between_hosts_gradients_are_those_of_fp32_but_for_rounding(size: int) -> None:
    with on_hosts(size), recording() as recorder:
        run = Run(PROGRAMS["int8"], recorder)
        for _ in range(STEPS):
            run.step()
        buckets = run.net.reducer.buckets
    exact = Run(Program(net={"wide": True}), recorder, "cpu")
    exact.step()
    assert not recorder.races, recorder.report()
    kinds = {type(bucket.wire) for bucket in buckets if bucket.quantization is not None}
    assert kinds == {QuantizedInterHost if size > 1 else QuantizedFormat}
    mine, theirs = gradients(run), gradients(exact)
    assert all(torch.equal(mine, each) for each in gather(mine))
    assert 0 < (mine - theirs).norm() < 0.02 * theirs.norm()
