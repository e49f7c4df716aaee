"""The elastic example: it resumes after the death of a rank, with bit-identical results."""

import random
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
from torch import Tensor, nn
from training import drawn

pytest.importorskip("tqdm", reason="needs the extra [examples]")
sys.path.append(str(ROOT / "examples"))

import elastic
from checkpoints import Checkpoints
from tasks import Task

STEPS, EVERY = 12, 3
OPTIONS = ("--steps", STEPS, "--every", EVERY, "--batch-size", 8, "--bucket-cap-mb", 0.003)


def tiny(plain: bool = False) -> Task:
    """A task of milliseconds. Unless ``plain``, its model has rank-local random state.

    The gradients are not ready in the reverse order of registration.
    """

    def model() -> nn.Module:
        layers = Layers("210", 24, order="012")
        return layers if plain else nn.Sequential(nn.BatchNorm1d(24), nn.Dropout(0.2), layers)

    inputs = drawn(72, 24, rank=0)
    targets = (inputs.sum(1) > 0).long()
    data = inputs[:60], targets[:60], inputs[60:], targets[60:]
    return Task("tiny", "sample", model, *data, {}, STEPS, 8, 0.01)


class Stopped(Exception):
    """Raised in place of the death of all ranks."""


def train(folder: Path, *more: str, plain: bool = False) -> Any:
    words = ("--checkpoints", folder, *OPTIONS, *more)
    args = elastic.parse_arguments([str(word) for word in words])
    checkpoints = Checkpoints(args.checkpoints, args.keep)
    return elastic.train(tiny(plain), args, torch.device("cpu"), checkpoints)


def parameters(folder: Path, stop_at: int | None) -> list[Tensor]:
    """Train, and return the parameters; nothing if all ranks stop before step ``stop_at``."""
    take_step = elastic.Training.take_step

    def step(self: Any) -> None:
        if self.step == stop_at:
            raise Stopped
        take_step(self)

    with mock.patch.object(elastic.Training, "take_step", step), suppress(Stopped):
        training = train(folder, "--noise", "0", plain=True)
        return [parameter.detach() for parameter in training.ddp.parameters()]
    return []


def test_other_numbers_of_ranks_go_on_with_the_same_training(tmp_path: Path) -> None:
    expected = run_ranks(parameters, 3, tmp_path / "unharmed", None)
    for world_size, stop_at in ((3, 5), (2, 7), (1, 10), (3, None)):
        found = run_ranks(parameters, world_size, tmp_path / "elastic", stop_at)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(ours, found[0], f"rank {rank}")
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


SCRIPT = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT / "examples")]!r}
import elastic
from test_elastic import tiny
elastic.TASKS["digits"] = tiny
sys.exit(elastic.main())
"""


def report(folder: Path) -> str:
    return train(folder).report()


@pytest.mark.long
def test_torchrun_brings_a_run_through_a_death(tmp_path: Path) -> None:
    expected, _ = run_ranks(report, 2, tmp_path / "unharmed")
    kill_at, victim = random.randrange(EVERY, STEPS), random.randrange(2)
    print(f"rank {victim} dies in step {kill_at}")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    kills = ("--kill-at", kill_at, "--kill-rank", victim)
    words = ("--max-restarts", 1, script, "--checkpoints", tmp_path / "run", *OPTIONS, *kills)
    done = launched.run(*map(str, words), env={"PYTHONPATH": str(ROOT)}, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    resumed = f"resumed at step {kill_at // EVERY * EVERY}, saved by 2 ranks"
    assert [line for line in lines if "resumed" in line] == [resumed]
    saved = [line for line in lines if line.startswith("saved")]
    assert saved == [f"saved step {step}" for step in range(EVERY, STEPS + 1, EVERY)]
    assert lines[-1] == expected
