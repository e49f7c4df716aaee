"""The convergence benchmark trains what it says, on the wires that it says, and judges by rule."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from launched import ROOT, run

from benchmarks.base.results import Result
from benchmarks.convergence.compared import compared
from benchmarks.report.table import text
from benchmarks.report.tables import convergence

pytest.importorskip("sklearn", reason="needs the extra [examples]")
pytest.importorskip("tqdm", reason="needs the extra [examples]")

BENCHMARK = ROOT / "benchmarks" / "convergence" / "convergence.py"
ENV = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.thorough
def test_all_wires_of_a_seed_train_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "convergence.json"
    arguments = ("--tasks", "opposed", "--steps", "40", "--seeds", "3", "4", "--out", out)
    done = run(BENCHMARK, *arguments, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert content["benchmark"] == "convergence"
    assert content["world_size"] == 2
    assert content["seeds"] == [3, 4]
    (task,) = content["tasks"].values()
    wires = ["fp32", "bf16", "int8", "int8 without feedback"]
    assert list(task["losses"]) == list(task["comparisons"]) == wires
    assert task["evaluated_after"] == list(range(2, 41, 2))
    assert task["same_bits_after_steps"] == 2 * 40
    for curves in task["losses"].values():
        assert [len(curve) for curve in curves] == [20, 20]
        assert curves[0] != curves[1]
    assert len({str(curves) for curves in task["losses"].values()}) == 4
    sent = task["sent_bytes"]
    assert sent["bf16"] < 0.51 * sent["fp32"]
    assert sent["int8"] == sent["int8 without feedback"] < 0.7 * sent["bf16"]
    # What the task is there for.
    away = {wire: max(map(abs, one["differences"])) for wire, one in task["comparisons"].items()}
    assert away["int8"] < 0.5 * away["int8 without feedback"]
    assert "\n".join(text(convergence(Result(content)))) in done.stdout


@pytest.mark.thorough
def test_a_step_after_which_ranks_differ_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "differing.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks.convergence import convergence

class Differing(convergence.DistributedDataParallel):
    steps = 0

    def forward(self, x):
        self.steps += self.training
        if self.steps == 3 and torch.distributed.get_rank() == 1:
            with torch.no_grad():
                next(self.module.parameters()).mul_(1 + 1e-6)
        return super().forward(x)

convergence.DistributedDataParallel = Differing
sys.exit(convergence.main())
"""
    )
    done = run(script, "--tasks", "digits", "--wires", "fp32", "--steps", "5", env=ENV)
    assert done.returncode != 0
    assert "digits, seed 0: after step 3 the ranks do not hold the same bits of fp32: 0" in (
        done.stderr
    )


def test_the_mean_is_held_against_the_range_of_the_first_wire() -> None:
    finals = {
        "fp32": [1.0, 1.2, 1.1],
        "better": [0.9, 1.0, 0.8],
        "as good": [1.3, 1.2, 1.09],
        "worse": [1.2, 1.2, 1.21],
        "broken": [1.1, math.nan, 1.1],
    }
    found = compared({wire: [[9.0, loss] for loss in losses] for wire, losses in finals.items()})
    assert {wire: one["verdict"] for wire, one in found.items()} == {
        "fp32": None,
        "better": "below",
        "as good": "within",
        "worse": "above",
        "broken": "above",
    }
    assert found["as good"]["differences"] == pytest.approx([0.3, 0.0, -0.01])
    assert (found["as good"]["low"], found["as good"]["high"]) == (1.09, 1.3)
