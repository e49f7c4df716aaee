"""On a GPU: gradients that the engine does not announce, and parameters that it does not reach."""

from dataclasses import replace

import pytest
import torch
from distributed import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import wrap

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP
from recording.test_captured import capture_a_step, running


class Inner(nn.Module):
    """Its middle layer runs in a reentrant checkpoint on demand; the last gradient is another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.third = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 8)
        self.last = nn.Parameter(torch.randn(5, 8))
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        y = (
            checkpoint(self.middle, y, use_reentrant=True)
            if self.is_checkpointed
            else self.middle(y)
        )
        return self.third(y.tanh()).tanh() + self.last


@ranks(2, views=True, interprets=True)
def test_a_bucket_that_waits_for_the_end_is_packed_behind_all_streams(view: bool) -> None:
    with recording() as recorder:
        ddp = wrap(Inner().to("cuda"), view, bucket_cap_mb=6e-4)
        x, side = torch.randn(5, 6).to("cuda").requires_grad_(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(WARM_UP + 4):
                ddp.module.is_checkpointed = step >= WARM_UP
                ddp.zero_grad()
                ddp(x).sum().backward()
                for param in ddp.parameters():
                    param.grad.cpu()  # the host waits for this stream
        torch.cuda.synchronize()
        assert not recorder.races, recorder.report()


@pytest.mark.parametrize("name", ["copies", "views", "copies, zeroed in place"])
@ranks(2, interprets=True)
def test_a_captured_step_that_leaves_a_parameter_out_is_refused(name: str) -> None:
    with running(PROGRAMS[name]) as run:
        for _ in range(WARM_UP + 1):
            run.step()
        run.program = replace(run.program, leaves_out=True)
        with pytest.raises(RuntimeError, match="does not reach 'third"):
            capture_a_step(run)
