"""The elastic example: it resumes after the death of a rank, with bit-identical results."""

import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import launched
import pytest
import torch
from distributed import assert_same_bits, run_ranks
from launched import ROOT
from torch import Tensor, nn

pytest.importorskip("tqdm", reason="needs the extra [examples]")
sys.path.append(str(ROOT / "examples"))

import elastic
from checkpoints import Checkpoints
from tasks import Task

STEPS, EVERY = 12, 3
OPTIONS = ("--steps", STEPS, "--every", EVERY, "--batch-size", 8, "--bucket-cap-mb", 0.003)


class Model(nn.Module):
    """A model whose gradients are not ready in the reverse order of registration."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.last = nn.Linear(180, 2)
        self.first = nn.Linear(6, 180)
        random_parts = nn.BatchNorm1d(180), nn.ReLU(), nn.Dropout(0.2)
        self.middle = nn.Tanh() if plain else nn.Sequential(*random_parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def tiny(plain: bool = False) -> Task:
    """A task of milliseconds. Unless ``plain``, its model has rank-local random state."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(72, 6, generator=generator)
    targets = (inputs.sum(1) > 0).long()
    data = inputs[:60], targets[:60], inputs[60:], targets[60:]
    return Task("tiny", "sample", lambda: Model(plain), *data, {}, STEPS, 8, 0.01)


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

    with mock.patch.object(elastic.Training, "take_step", step):
        try:
            training = train(folder, "--noise", "0", plain=True)
        except Stopped:
            return []
    return [parameter.detach().clone() for parameter in training.ddp.parameters()]


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
