"""CUDA graphs: what is captured needs nothing of the host; what no replay could do is refused.

As far as a machine without a GPU can tell: what the host does while a graph is captured, and which
memory the graph goes on to use. Replays are those of ``tests/gpu``.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from torch import Tensor, nn
from training import breaking_off

from recording.device import recording
from recording.programs import PROGRAMS, Program, Run
from tritonddp.coordination.agreement import Agreement, SchemaMismatch
from tritonddp.reducer import capture


@contextlib.contextmanager
def running(program: Program) -> Iterator[Run]:
    """Context, on a side stream: a program whose order is right, whatever is captured of it."""
    with recording() as recorder:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run = Run(program, recorder)
            yield run
        recorder.has_graph = False
        torch.cuda.synchronize()
        assert not recorder.races, recorder.report()


def capture_a_step(run: Run) -> None:
    with run.recorder.graph():
        run.step()


def refuse_a_step(run: Run, said: str) -> None:
    """A capture is refused in these words, and training goes on."""
    with pytest.raises(RuntimeError, match=said):
        capture_a_step(run)
    run.step()


CAPTURED = [
    *("copies", "copies, zeroed in place", "views", "views, zeroed in place", "bf16 wire"),
    *("bf16 wire, views", "int8", "lazy buckets", "communication hook", "buffers"),
    *("complex", "mixed precision", "scalars"),
]


@pytest.mark.long
@pytest.mark.parametrize("name", CAPTURED)
@ranks(2, interprets=True)
def test_after_one_step_a_step_is_captured(name: str) -> None:
    with running(PROGRAMS[name]) as run:
        run.step()
        capture_a_step(run)
        captured = run.recorder.launches, run.recorder.collectives
        assert captured[0]["flatten"] + captured[0]["quantize"] == len(run.net.reducer.buckets)
        # The tables of the graph go up with it.
        assert captured[0]["copy to the device"] >= len(run.net.reducer.buckets)
        assert captured[0]["copy to the host"] == 0
        assert not run.recorder.waits
        expected = run.gradients()
        run.step()
        assert run.recorder.collectives == captured[1]
        # What a replay has left on the device is not what an eager step reads.
        assert run.recorder.launches["copy to the device"] >= len(run.net.reducer.buckets)
        if run.program.options.get("compression") is None:
            torch.testing.assert_close(run.gradients(), expected, rtol=0, atol=0)


@ranks(2, interprets=True)
def test_buckets_outlive_a_graph_that_reduces_them() -> None:
    with running(PROGRAMS["copies"]) as run:
        run.step()
        capture_a_step(run)
        run.module.third.requires_grad_(False)
        for _ in range(12):  # buckets are made anew
            run.step()
        kept = run.net._ddp_state.core.manager._captured
        assert len(kept) == 4  # two buckets, and what unflattens each group of them
        assert set(kept).isdisjoint(run.net.reducer.buckets)


def _add(net: Any, x: Tensor) -> None:
    net.module.third = nn.Linear(8, 8).to("cuda")


def _given(net: Any, x: Tensor) -> None:
    params = list(net.module.parameters())
    net.reduce_gradients(torch.autograd.grad(net(x).sum(), params))


REFUSED: dict[str, tuple[Program, str]] = {
    "unused parameters": (PROGRAMS["unused parameters"], r"does not reach 'third\.bias'"),
    "weights": (PROGRAMS["weights"], r"weighted\(n\)"),
    "no_sync": (PROGRAMS["no_sync"], "under no_sync"),
    "check_finite": (PROGRAMS["check_finite"], "check_finite"),
    "sparse": (PROGRAMS["sparse"], "sparse gradients"),
    "reduce_gradients": (PROGRAMS["reduce_gradients"], "under no_sync"),
    "reduce_gradients of what is given": (Program(before=_given), "not reduced on request in a"),
    "join": (Program(around=lambda net: net.join()), r"inside join\(\)"),
}


@pytest.mark.parametrize("name", list(REFUSED))
@ranks(2, interprets=True)
def test_what_no_replay_could_do_is_refused_and_training_goes_on(name: str) -> None:
    program, said = REFUSED[name]
    with running(program) as run:
        run.step()
        refuse_a_step(run, rf"step \d, while a CUDA graph is .*{said}")
        sums = gather([float(gradient.sum()) for gradient in run.gradients()])
        assert sums[0] == sums[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "run one step, forward and backward"),
        (_add, "were added or unfrozen, .* run one step without a graph before"),
    ],
    ids=["at first", "after a change"],
)
@ranks(2, interprets=True)
def test_a_first_step_is_wanted(change: Callable[..., Any] | None, said: str) -> None:
    with running(PROGRAMS["copies"]) as run:
        if change is not None:
            run.step()
            change(run.net, run.x)
        refuse_a_step(run, said)
        capture_a_step(run)


class Reordered(nn.Module):
    """Gradients come in the order of registration: buckets are made anew after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(8, 4), nn.Linear(6, 8)

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("moves", [False, True], ids=["", "moved"])
@pytest.mark.parametrize("module", [None, Reordered], ids=["", "reordered"])
@ranks(2, interprets=True)
def test_a_module_that_is_wrapped_on_the_default_stream_is_refused(
    moves: bool, module: type[nn.Module] | None
) -> None:
    """Unless torch is told to move its nodes, which it can from 2.13 on."""
    with (
        recording() as recorder,
        mock.patch.object(capture, "moves_nodes_into_captures", return_value=moves),
    ):
        run = Run(PROGRAMS["copies"], recorder, module=module and module())
        tracker = run.net._ddp_state.core.tracker
        run.step()
        assert (run.net._ddp_state.core.tracker is tracker) == (module is None)
        said = "wrap it on a side stream"
        refused = contextlib.nullcontext() if moves else pytest.raises(RuntimeError, match=said)
        with refused, recorder.graph():
            run.step()
        recorder.has_graph = False
        run.step()
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_what_the_ranks_have_said_is_looked_at_before() -> None:
    with running(PROGRAMS["copies"]) as run:
        run.step()
        weighted = run.net.weighted(2) if dist.get_rank() else contextlib.nullcontext()
        with weighted:
            run.step()
        with pytest.raises(RuntimeError, match="the mean is weighted on some ranks only"):
            capture_a_step(run)


@ranks(2, interprets=True)
def test_a_replay_right_behind_a_step_is_in_order_with_it() -> None:
    with running(PROGRAMS["copies"]) as run:
        run.step()
        capture_a_step(run)
        run.step()
        for bucket in run.net._ddp_state.core.manager.current.buckets:
            bucket.flat.data.fill_(0)  # as the first kernel of a replay


@ranks(2, interprets=True)
def test_a_backward_that_fails_in_a_capture_has_sent_nothing() -> None:
    # (Not in running(): what this graph holds never runs on a card, where the recorder ran it.)
    with recording() as recorder, torch.cuda.stream(torch.cuda.Stream()):
        run = Run(PROGRAMS["copies"], recorder)
        run.step()
        with breaking_off(run.module.first.weight):
            capture_a_step(run)
        run.step()
        assert recorder.collectives.total() == len(run.net.reducer.buckets)
        sums = gather([float(gradient.sum()) for gradient in run.gradients()])
        assert sums[0] == sums[1]


@ranks(2, interprets=True)
def test_a_backward_that_broke_off_is_made_up_for_before() -> None:
    with running(PROGRAMS["copies"]) as run:
        run.step()
        with breaking_off(run.module.first.weight):
            run.step()
        refuse_a_step(run, "did not come to its end")


@ranks(2, interprets=True)
def test_ranks_that_reduce_other_parameters_are_told_without_a_collective() -> None:
    with running(PROGRAMS["copies"]) as run:
        run.step()
        run.step()  # the first one looks at its headers itself
        run.net._ddp_state.core.agreement.expected = b""  # what has come is something else
        with mock.patch.object(Agreement, "_look", side_effect=SchemaMismatch):
            said = "the ranks reduce different parameters. Run one step without a graph"
            with pytest.raises(RuntimeError, match=said):
                capture_a_step(run)
        run.step()
