"""On a GPU the engine is asked for one parameter alone, while all backwards have reached all."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import ranks
from modules import Layers
from oracle import assert_mean, one_per_rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import drawn, wrap

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP
from recording.test_captured import capture_a_step, running
from tritonddp.reducer.graph import readiness
from tritonddp.reducer.graph.readiness import will_execute


@contextlib.contextmanager
def counted_questions() -> Iterator[list[Any]]:
    """Context: the nodes for which the engine is asked."""
    asked: list[Any] = []

    def asks(node: Any) -> bool:
        asked.append(node)
        return will_execute(node)

    with mock.patch.object(readiness, "will_execute", asks):
        yield asked


@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "zeroed in place"])
@ranks(2, views=True, interprets=True)
def test_what_was_assumed_to_be_reached_and_is_not_counts_as_unused(
    rank: int, keeps: bool, view: bool
) -> None:
    """Of any layer, on one rank; from then on the engine is asked for each parameter again."""
    with recording():
        for left_out in range(4):
            ddp = wrap(Layers("abcd").double().to("cuda"), view, bucket_cap_mb=3e-4)
            alone = one_per_rank(ddp.module)
            route = "abcd".replace("abcd"[left_out], "")
            usual, other = {0: "abcd", 1: "abcd"}, {0: "abcd", 1: route}
            asked_for = []
            for number, routes in enumerate([usual] * 4 + [other] * 2 + [usual, other]):
                for net in (ddp, *alone):
                    net.zero_grad(set_to_none=not keeps)
                with counted_questions() as asked:
                    for each, net in [*enumerate(alone), (rank, ddp)]:
                        net(
                            drawn(2, 4, step=number, rank=each).double().to("cuda"), routes[each]
                        ).sum().backward()
                assert_mean(ddp, alone, f"without {route}, step {number}")
                asked_for.append(len(asked))
            assert asked_for[2:5] == ([1, 1, 1] if left_out or not rank else [1, 1, 9])
            assert asked_for[5:] == ([8] * 3 if rank else [1] * 3)


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
def test_nothing_is_assumed_of_a_captured_step(name: str) -> None:
    with running(PROGRAMS[name]) as run:
        for _ in range(WARM_UP + 1):
            run.step()
        run.program = replace(run.program, leaves_out=True)
        with pytest.raises(RuntimeError, match="does not reach 'third"):
            capture_a_step(run)
