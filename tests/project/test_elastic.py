"""The elastic example: it resumes after the death of a rank, with bit-identical results."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import launched
import pytest
import torch
from distributed import assert_same_bits, run_ranks
from launched import ROOT
from modules import Layers
from torch import Tensor
from training import drawn

pytest.importorskip("tqdm", reason="needs the extra [examples]")
sys.path.append(str(ROOT / "examples"))

import elastic
from checkpoints import Checkpoints
from tasks import Task

OPTIONS = ("--steps", "12", "--every", "3", "--batch-size", "8", "--bucket-cap-mb", "0.003")


def tiny() -> Task:
    """A task of milliseconds, whose gradients are ready in the order of registration."""
    inputs = drawn(72, 24, rank=0)
    targets = (inputs.sum(1) > 0).long()
    data = inputs[:60], targets[:60], inputs[60:], targets[60:]
    return Task("tiny", "sample", lambda: Layers("210", 24, order="012"), *data, {}, 12, 8, 0.01)


class Stopped(Exception):
    """Raised in place of the death of all ranks."""


def parameters(folder: Path, stop_at: int | None) -> list[Tensor]:
    """Train, and return the parameters; nothing if all ranks stop before step ``stop_at``."""
    take_step = elastic.Training.take_step

    def step(self: Any) -> None:
        if self.step == stop_at:
            raise Stopped
        take_step(self)

    args = elastic.parse_arguments(["--checkpoints", str(folder), *OPTIONS, "--noise", "0"])
    checkpoints = Checkpoints(args.checkpoints, args.keep)
    with mock.patch.object(elastic.Training, "take_step", step), suppress(Stopped):
        training = elastic.train(tiny(), args, torch.device("cpu"), checkpoints)
        return [parameter.detach() for parameter in training.ddp.parameters()]
    return []


def test_other_numbers_of_ranks_go_on_with_the_same_training(tmp_path: Path) -> None:
    expected = run_ranks(parameters, 3, tmp_path / "unharmed", None)
    for world_size, stop_at in ((3, 5), (2, 7), (1, 10), (3, None)):
        found = run_ranks(parameters, world_size, tmp_path / "elastic", stop_at)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(ours, found[0], f"rank {rank}")
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_torchrun_brings_a_run_through_a_death(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra [examples]")

    def train(folder: str, *kills: str) -> list[str]:
        words = (elastic.__file__, "--checkpoints", tmp_path / folder, *OPTIONS, *kills)
        done = launched.run("--max-restarts", "1", *words, env={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if "step" in line]

    *expected, last = train("unharmed")
    assert expected == [f"saved step {step}" for step in (3, 6, 9, 12)]
    expected.insert(2, "resumed at step 6, saved by 2 ranks")
    assert train("run", "--kill-at", "7", "--kill-rank", "1") == [*expected, last]
