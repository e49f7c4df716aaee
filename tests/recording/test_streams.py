"""The streams on which the package packs and writes gradients."""

from unittest import mock

import torch
from distributed import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import train_step, wrap

from recording.device import recording
from recording.programs import WARM_UP, sound
from tritonddp import DistributedDataParallel, _device, _torch


def test_without_the_call_in_c_the_current_stream_is_the_same() -> None:
    absent = mock.patch.object(_torch, "raw_current_stream", None)
    with recording(), absent, torch.cuda.stream(side := torch.cuda.Stream()):
        assert _device.current_stream(side.device) == side


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


@ranks(2, views=True, interprets=True)
def test_gradients_of_a_side_stream_are_written_on_the_stream_of_the_backward(view: bool) -> None:
    """As in stock DDP, which does not record streams either."""
    with sound():
        net = wrap(Branch().to("cuda"), view, bucket_cap_mb=2e-4)
        x = torch.ones(4, 8, device="cuda")
        for _ in range(4):
            train_step(net, x, loss=torch.sum)
            torch._foreach_norm([param.grad for param in net.parameters()])


@ranks(2, interprets=True)
def test_the_stream_of_the_first_gradient_of_a_backward_is_known() -> None:
    """Also if the backward does not begin at an output of the wrapper."""
    with recording():
        net, x = DistributedDataParallel(nn.Linear(8, 4).to("cuda")), torch.ones(4, 8).to("cuda")
        for _ in range(3):
            net(x)
            train_step(net.module, x, loss=torch.sum)
        assert not net._ddp_state.core.tracker.gradients.unheard


class Checkpointed(nn.Module):
    """The middle layer may run in a reentrant checkpoint. The gradient of ``last`` is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.third = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 8)
        self.last = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor, is_checkpointed: bool) -> Tensor:
        y = self.first(x).tanh()
        y = checkpoint(self.middle, y, use_reentrant=True) if is_checkpointed else self.middle(y)
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
                train_step(ddp, x, step >= WARM_UP, loss=torch.sum)
                for param in ddp.parameters():
                    param.grad.cpu()  # the host waits for this stream
