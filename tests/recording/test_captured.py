"""The capture of a step in a CUDA graph does not involve the host, or is refused with the reason.

These tests check what the host does during a capture, and the memory that the graph uses later.
``tests/gpu`` tests replays.
"""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from training import breaking_off

from recording.device import recording
from recording.programs import PROGRAMS, Program, Run, running
from tritonddp.reducer import capture


def prepared(program: Program, steps: int = 1) -> contextlib.AbstractContextManager[Run]:
    return running(program, steps, is_on_side=True)


def capture_a_step(run: Run) -> None:
    with run.recorder.graph():
        run.step()


def refuse_a_step(run: Run, message: str) -> None:
    """A capture raises this error, and training continues."""
    with pytest.raises(RuntimeError, match=message):
        capture_a_step(run)
    run.step()
    assert_same_on_all_ranks(run.gradients())


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
    with prepared(PROGRAMS["copies"]) as run:
        capture_a_step(run)
        run.module.third.requires_grad_(False)
        run.step(12)  # new buckets replace them; the recorder reports memory that is freed


def _reduce_given(net: Any, x: Tensor) -> None:
    params = list(net.module.parameters())
    net.reduce_gradients(torch.autograd.grad(net(x).sum(), params))


REFUSED: dict[str, tuple[Program, str]] = {
    "unused parameters": (PROGRAMS["unused parameters"], r"does not use 'third\.bias'"),
    "weights": (PROGRAMS["weights"], r"weighted\(n\)"),
    "no_sync": (PROGRAMS["no_sync"], r"inside no_sync\(\)"),
    "check_finite": (PROGRAMS["check_finite"], "check_finite"),
    "sparse": (PROGRAMS["sparse"], "sparse gradients"),
    "given gradients": (Program(before=_reduce_given), "gradients cannot be reduced on request"),
    "join": (Program(around=lambda net: net.join()), r"inside join\(\)"),
}


@pytest.mark.parametrize("name", list(REFUSED))
@ranks(2, interprets=True)
def test_a_step_that_replays_cannot_repeat_is_refused(name: str) -> None:
    program, message = REFUSED[name]
    with prepared(program) as run:
        refuse_a_step(run, rf"step \d, while a CUDA graph is .*{message}")


def _replace_a_layer(run: Run) -> None:
    run.step()
    run.module.third = nn.Linear(8, 8).to("cuda")


def _fail_on_both_ranks(run: Run) -> None:
    run.step()
    with breaking_off(run.module.first.weight):
        run.step()


UNPREPARED: dict[str, tuple[Callable[[Run], None], str]] = {
    "first step": (lambda run: None, "[Rr]un one eager step .forward and backward"),
    "new layer": (_replace_a_layer, "were added or unfrozen, .* Run one eager step before"),
    "failed backward": (_fail_on_both_ranks, "the previous backward failed"),
}


@pytest.mark.parametrize("name", list(UNPREPARED))
@ranks(2, interprets=True)
def test_a_capture_needs_a_sound_step_before_it(name: str) -> None:
    change, message = UNPREPARED[name]
    with prepared(PROGRAMS["copies"], 0) as run:
        change(run)
        refuse_a_step(run, message)
        capture_a_step(run)


@ranks(2, interprets=True)
def test_a_capture_checks_the_headers_of_the_step_before_it() -> None:
    with prepared(PROGRAMS["copies"]) as run:
        with run.net.weighted(2) if dist.get_rank() else contextlib.nullcontext():
            run.step()
        with pytest.raises(RuntimeError, match="only some ranks use a weighted mean"):
            capture_a_step(run)


@pytest.mark.parametrize("moves", [False, True], ids=["", "moved"])
@ranks(2, interprets=True)
def test_a_module_wrapped_on_the_default_stream_is_refused(moves: bool) -> None:
    """Unless torch moves the nodes to the capturing stream, as torch 2.13 does."""
    with (
        recording() as recorder,
        mock.patch.object(capture, "moves_nodes_into_captures", return_value=moves),
    ):
        run = Run(PROGRAMS["copies"], recorder)
        run.step()
        refused = pytest.raises(RuntimeError, match="Wrap the module on a side stream")
        with contextlib.nullcontext() if moves else refused:
            capture_a_step(run)
        recorder.has_graph = False
        run.step()
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_a_replay_right_after_a_step_is_ordered_after_it() -> None:
    with prepared(PROGRAMS["copies"]) as run:
        capture_a_step(run)
        run.step()
        for bucket in run.net._ddp_state.core.manager.current.buckets:
            bucket.flat.data.fill_(0)  # as the first kernel of a replay


@ranks(2, interprets=True)
def test_a_backward_that_fails_in_a_capture_has_sent_nothing() -> None:
    # Not in running(): the recorder runs captured work, and a GPU does not.
    with recording() as recorder, torch.cuda.stream(torch.cuda.Stream()):
        run = Run(PROGRAMS["copies"], recorder)
        run.step()
        with breaking_off(run.module.first.weight):
            capture_a_step(run)
        run.step()
        assert recorder.collectives.total() == len(run.net.reducer.buckets)
        assert_same_on_all_ranks(run.gradients())
