"""By which calls the package asks for streams: in a step each through ``torch.cuda`` is dear."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import ranks
from torch import Tensor, nn

from recording.device import recording
from recording.recorder import Recorder
from tritonddp import DistributedDataParallel, _device, _torch


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as recorder:
        yield recorder


def refused(name: str, owner: Any = torch.cuda) -> Any:
    return mock.patch.object(owner, name, side_effect=AssertionError(name))


@ranks(2)
def test_peer_memory_is_refused_where_parameters_are_on_a_gpu() -> None:
    with recording():
        layer = nn.Linear(2, 2).to("cuda")
        for module in (layer, nn.Sequential(layer, nn.Linear(2, 2))):
            with pytest.raises(ValueError, match="on GPUs NCCL does the same: use "):
                DistributedDataParallel(module, transport="peer_memory")


def test_a_tensor_is_brought_home_again_by_calls_in_c(recorder: Recorder) -> None:
    x, readback = torch.ones(4, device="cuda"), _device.Readback()
    torch.cuda.synchronize()  # the work is over
    readback.start(x)
    refusals = refused("current_stream"), refused("stream"), refused("Stream")
    with refusals[0], refusals[1], refusals[2]:
        readback.wait()
        x.add_(1)
        torch.cuda.synchronize()
        readback.start(x)
        assert readback.wait().tolist() == [2] * 4
    assert recorder.current is recorder.default
    assert not recorder.races, recorder.report()


class Branch(nn.Module):
    """One layer runs on another stream: its gradients lie in memory of that one's pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            z = self.beside(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return self.last(y + z)


@pytest.mark.parametrize("waits", [True, False])
@ranks(2, views=True, interprets=True)
def test_gradients_of_a_side_stream_are_written_like_an_optimizer_reads_them(
    view: bool, waits: bool
) -> None:
    """On the stream that ``backward()`` is called on: as in stock, which records no stream either.

    So whatever a side stream allocates next has to wait for that one, for the sake of an
    optimizer alone.
    """
    with recording() as recorder:
        net = DistributedDataParallel(
            Branch().to("cuda"), bucket_cap_mb=2e-4, gradient_as_bucket_view=view
        )
        x = torch.ones(4, 8, device="cuda")
        for _ in range(4):
            net.zero_grad()
            if not waits:
                with torch.cuda.stream(net.module.side):
                    torch.ones(8, 8, device="cuda")
            net(x).sum().backward()
            torch._foreach_norm([param.grad for param in net.parameters()])
        torch.cuda.synchronize()
        assert bool(recorder.races) == (not waits and not view), recorder.report()


@ranks(2, interprets=True)
def test_the_stream_of_a_gradient_that_begins_a_backward_is_noted_too() -> None:
    with recording():
        net = DistributedDataParallel(nn.Linear(8, 4).to("cuda"))
        for _ in range(3):
            net.zero_grad()
            net(torch.ones(4, 8, device="cuda"))
            net.module(torch.ones(4, 8, device="cuda")).sum().backward()
        assert not net._ddp_state.core.tracker.gradients.unheard


def test_without_the_call_in_c_streams_are_the_same(recorder: Recorder) -> None:
    side = torch.cuda.Stream()
    with (
        mock.patch.object(_torch, "raw_current_stream", None),
        torch.cuda.stream(side),
    ):
        assert recorder.current is side.timeline
        assert _device.current_stream(side.device) == side
    assert recorder.current is recorder.default
