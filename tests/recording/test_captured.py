"""The capture of a step in a CUDA graph does not involve the host, or is refused with the reason.

These tests check what the host does during a capture, and the memory that the graph uses later.
``tests/gpu`` tests replays.
"""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from training import breaking_off, raises_if

from recording.device import recording
from recording.programs import PROGRAMS, Program, Run, running
from tritonddp.reducer import capture


def prepared(program: Program, steps: int = 1) -> contextlib.AbstractContextManager[Run]:
    return running(program, steps, is_on_side=True)


def capture_a_step(run: Run) -> None:
    with run.recorder.graph():
        run.step()


COPIES = PROGRAMS["copies"]
CAPTURED = ("copies", "views", "bf16 wire", "int8", "lazy buckets", "communication hook")
CAPTURED += ("buffers", "complex", "mixed precision", "scalars")


@pytest.mark.long
@pytest.mark.parametrize("name", CAPTURED)
@ranks(2, interprets=True)
def test_after_one_step_a_step_is_captured(name: str) -> None:
    with prepared(PROGRAMS[name]) as run:
        capture_a_step(run)
        buckets = len(run.net.reducer.buckets)
        launches, collectives = run.recorder.launches, run.recorder.collectives.copy()
        assert launches["flatten"] + launches["quantize"] == buckets
        assert launches["copy to the device"] >= buckets  # the tables of the graph
        assert launches["copy to the host"] == 0
        assert not run.recorder.waits
        expected = run.gradients()
        run.step()
        assert run.recorder.collectives == collectives
        # An eager step does not read tables that a replay has left on the device.
        assert run.recorder.launches["copy to the device"] >= buckets
        if run.program.options.get("compression") is None:
            torch.testing.assert_close(run.gradients(), expected, rtol=0, atol=0)


@ranks(2, interprets=True)
def test_buckets_outlive_a_graph_that_reduces_them() -> None:
    with prepared(COPIES) as run:
        capture_a_step(run)
        run.module.third.requires_grad_(False)
        run.step(12)  # new buckets replace them; the recorder reports memory that is freed


def _reduce_given(net: Any, x: Tensor) -> None:
    params = list(net.module.parameters())
    net.reduce_gradients(torch.autograd.grad(net(x).sum(), params))


def _replace_a_layer(run: Run) -> None:
    run.module.third = nn.Linear(8, 8).to("cuda")


def _fail_on_both_ranks(run: Run) -> None:
    with breaking_off(run.module.first.weight):
        run.step()


REFUSED: dict[str, tuple[Program, str]] = {
    "unused parameters": (PROGRAMS["unused parameters"], r"does not use 'third\.bias'"),
    "weights": (PROGRAMS["weights"], r"weighted\(n\)"),
    "no_sync": (PROGRAMS["no_sync"], r"inside no_sync\(\)"),
    "check_finite": (PROGRAMS["check_finite"], "check_finite"),
    "sparse": (PROGRAMS["sparse"], "sparse gradients"),
    "given gradients": (Program(before=_reduce_given), "gradients cannot be reduced on request"),
    "join": (Program(around=lambda net: net.join()), r"inside join\(\)"),
    # These can be captured after one more eager step.
    "first step": (COPIES, "Run one eager step .forward and backward"),
    "new layer": (COPIES, "were added or unfrozen, .* Run one eager step before"),
    "failed backward": (COPIES, "the previous backward failed"),
}
# After the eager step.
CHANGES = {"new layer": _replace_a_layer, "failed backward": _fail_on_both_ranks}


@pytest.mark.parametrize("name", list(REFUSED))
@ranks(2, interprets=True)
def test_a_step_that_replays_cannot_repeat_is_refused(name: str) -> None:
    program, message = REFUSED[name]
    with prepared(program, 0 if name == "first step" else 1) as run:
        if name in CHANGES:
            CHANGES[name](run)
        message = rf"step \d, while a CUDA graph is captured: .*{message}"
        with pytest.raises(RuntimeError, match=message):
            capture_a_step(run)
        run.step()
        assert_same_on_all_ranks(run.gradients())
        if program is COPIES:
            capture_a_step(run)


@ranks(2, interprets=True)
def test_a_capture_checks_the_headers_of_the_step_before_it() -> None:
    with prepared(COPIES) as run:
        with run.net.weighted(2) if dist.get_rank() else contextlib.nullcontext():
            run.step()
        with pytest.raises(RuntimeError, match="only some ranks use a weighted mean"):
            capture_a_step(run)


@pytest.mark.parametrize("moves", [False, True], ids=["", "moved"])
@ranks(2, interprets=True)
def test_a_module_wrapped_on_the_default_stream_is_refused(moves: bool) -> None:
    """Unless torch moves the nodes to the capturing stream, as torch 2.13 does."""
    moving = mock.patch.object(capture, "moves_nodes_into_captures", return_value=moves)
    with recording() as recorder, moving:
        run = Run(COPIES, recorder)
        run.step()
        with raises_if(not moves, RuntimeError, "Wrap the module on a side stream"):
            capture_a_step(run)
        recorder.has_graph = False
        run.step()
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_a_replay_right_after_a_step_is_ordered_after_it() -> None:
    with prepared(COPIES) as run:
        capture_a_step(run)
        run.step()
        for bucket in run.net._ddp_state.core.manager.current.buckets:
            bucket.flat.data.fill_(0)  # as the first kernel of a replay


@ranks(2, interprets=True)
def test_a_backward_that_fails_in_a_capture_has_sent_nothing() -> None:
    # Not in running(): the recorder runs captured work, and a GPU does not.
    with recording() as recorder, torch.cuda.stream(torch.cuda.Stream()):
        run = Run(COPIES, recorder)
        run.step()
        with breaking_off(run.module.first.weight):
            capture_a_step(run)
        run.step()
        assert recorder.collectives.total() == len(run.net.reducer.buckets)
        assert_same_on_all_ranks(run.gradients())


@ranks(2, interprets=True)
def test_a_stop_that_is_requested_before_a_capture_is_sent_with_the_step_after_it(
    rank: int,
) -> None:
    with prepared(COPIES, 3) as run:
        if rank == 0:
            run.net.request_stop()
        capture_a_step(run)
        for expected in (False, False, True):  # a capture reduces nothing
            assert run.net.should_stop() is expected
            run.step()
