"""How the package asks for streams, and on which stream it packs and writes gradients."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from distributed import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import wrap

from recording.device import recording
from recording.programs import WARM_UP, sound
from recording.recorder import Recorder
from tritonddp import DistributedDataParallel, _device, _torch


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with sound() as recorder:
        yield recorder


@ranks(2)
def test_peer_memory_is_refused_if_parameters_are_on_a_gpu() -> None:
    with recording():
        layer = nn.Linear(2, 2).to("cuda")
        for module in (layer, nn.Sequential(layer, nn.Linear(2, 2))):
            with pytest.raises(ValueError, match="On GPUs NCCL uses peer memory itself"):
                DistributedDataParallel(module, transport="peer_memory")


def test_a_readback_makes_no_stream_in_python(recorder: Recorder) -> None:
    """The calls of ``torch.cuda`` are slow."""
    x, readback = torch.ones(4, device="cuda"), _device.Readback()
    torch.cuda.synchronize()
    readback.start(x)
    refused = dict.fromkeys(("current_stream", "stream", "Stream"))
    with mock.patch.multiple(torch.cuda, **refused):
        readback.wait()
        x.add_(1)
        torch.cuda.synchronize()
        readback.start(x)
        assert readback.wait().tolist() == [2] * 4
    assert recorder.current is recorder.default


def test_without_the_call_in_c_streams_are_the_same(recorder: Recorder) -> None:
    side = torch.cuda.Stream()
    with mock.patch.object(_torch, "raw_current_stream", None), torch.cuda.stream(side):
        assert recorder.current is side.timeline
        assert _device.current_stream(side.device) == side
    assert recorder.current is recorder.default


class Branch(nn.Module):
    """One layer runs on another stream, so its gradients are in memory of that stream's pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            z = self.branch(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return self.last(y + z)


@pytest.mark.parametrize("waits", [True, False])
@ranks(2, views=True, interprets=True)
def test_gradients_of_a_side_stream_are_written_on_the_stream_of_the_backward(
    view: bool, waits: bool
) -> None:
    """As in stock DDP, which records no stream either.

    A side stream has to wait for that stream before it allocates, also because of the optimizer.
    """
    with recording() as recorder:
        net = wrap(Branch().to("cuda"), view, bucket_cap_mb=2e-4)
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
def test_the_stream_of_the_first_gradient_of_a_backward_is_noted() -> None:
    with recording():
        net = DistributedDataParallel(nn.Linear(8, 4).to("cuda"))
        for _ in range(3):
            net.zero_grad()
            net(torch.ones(4, 8, device="cuda"))
            net.module(torch.ones(4, 8, device="cuda")).sum().backward()
        assert not net._ddp_state.core.tracker.gradients.unheard


class Checkpointed(nn.Module):
    """Its middle layer can run in a reentrant checkpoint; another gradient is the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.third = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 8)
        self.last = nn.Parameter(torch.randn(5, 8))
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        if self.is_checkpointed:
            y = checkpoint(self.middle, y, use_reentrant=True)
        else:
            y = self.middle(y)
        return self.third(y.tanh()).tanh() + self.last


@ranks(2, views=True, interprets=True)
def test_a_bucket_with_unexpected_gradients_is_packed_after_the_work_of_all_streams(
    view: bool,
) -> None:
    with sound():
        ddp = wrap(Checkpointed().to("cuda"), view, bucket_cap_mb=6e-4)
        x, side = torch.randn(5, 6).to("cuda").requires_grad_(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(WARM_UP + 4):
                ddp.module.is_checkpointed = step >= WARM_UP
                ddp.zero_grad()
                ddp(x).sum().backward()
                for param in ddp.parameters():
                    param.grad.cpu()  # the host waits for this stream
