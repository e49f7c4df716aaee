"""One small run of the step benchmark: what it counts is right, and what it writes is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarked import measured
from launched import ROOT

from benchmarks.base import deadline
from tritonddp.coordination.agreement import BYTES

PARAMETERS = {"mlp": 12 * (512 * 512 + 512), "branchy": 400 * (32 * 32 + 32)}
TENSORS = {"mlp": 24, "branchy": 800}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("branchy", marks=pytest.mark.long),
        pytest.param("mlp", marks=pytest.mark.thorough),
    ],
)
def test_step_measures_every_configuration(name: str, tmp_path: Path) -> None:
    content, printed = measured(
        "step/step.py",
        tmp_path / "step.json",
        *("--models", name, "--rounds", "2", "--builds", "1"),
    )
    assert content["benchmark"] == "step"
    assert content["machine"]["torch"] == torch.__version__
    assert content["world_size"] == 2
    assert list(content["models"]) == [name]
    for result in content["models"].values():
        assert result["rounds"] == [2]
        configurations = list(result["seconds"])
        assert {"unwrapped", "stock again", "ours", "ours views"} <= set(configurations)
        assert ("ours strict" in configurations) == (name == "mlp")
        assert all(each["same_bits"] for each in result["gradients"].values())
        assert all(each["same_on_all_ranks"] for each in result["gradients"].values())
        for key in ("step_seconds", "wire_bytes", "sent_bytes", "collectives", "launches"):
            assert list(result[key]) == configurations
        payload = 4 * PARAMETERS[name]
        for configuration in configurations:
            searches = "find_unused" in configuration or (
                configuration.startswith("stock") and name == "branchy"
            )
            extra = 4 * TENSORS[name] if searches or configuration.startswith("ours") else 0
            if configuration.startswith("ours"):
                extra += 4 * BYTES * 2  # the headers of two ranks
            if configuration == "unwrapped":
                assert result["wire_bytes"][configuration] == 0
                assert result["collectives"][configuration] == 0
            else:
                assert result["wire_bytes"][configuration] == payload + extra, configuration
                # Of two ranks each sends 2 (2 - 1) / 2 of an all-reduce; through memory nothing is.
                is_sent = not configuration.startswith("ours")
                sent = (payload + extra) * is_sent
                assert result["sent_bytes"][configuration] == sent, configuration
                collectives = (2 + searches) * is_sent
                assert result["collectives"][configuration] == collectives, configuration
        for one in result["comparisons"].values():
            assert one["bound"] == (0.9 if name == "branchy" else 1.02)
            assert one["verdict"] in ("met", "within spread", "missed", "too noisy")
            assert one["best"] in configurations
        for raw in (result["raw_seconds_per_rank"], result["raw_forward_seconds_per_rank"]):
            assert len(raw) == 2
            assert [len(build) for build in raw[0]["ours"]] == [2]
            assert raw[0]["ours"] != raw[1]["ours"]
    assert f"{name}: gradients bit-equal to stock's" in printed


@pytest.mark.thorough
def test_a_late_run_takes_few_rounds_of_what_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(deadline.VARIABLE, "0")
    content, printed = measured(
        "step/step.py",
        tmp_path / "step.json",
        *("--models", "mlp", "--rounds", "500", "--compared-only"),
    )
    result = content["models"]["mlp"]
    assert result["rounds"] == [deadline.LEAST_ROUNDS]
    assert "stock again" in result["seconds"]
    assert not {"stock find_unused", "ours strict"} & set(result["seconds"])
    assert f"{deadline.LEAST_ROUNDS} rounds" in printed


@pytest.mark.thorough
def test_late_memory_has_one_row_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(deadline.VARIABLE, "0")
    content, _ = measured(
        "step/memory.py",
        tmp_path / "memory.json",
        "--models",
        "mlp",
        "branchy",
    )
    assert {name: list(rows) for name, rows in content["models"].items()} == {"mlp": ["ours"]}
    assert {"mlp ours views", "mlp stock", "branchy ours"} <= set(content["left_out"])


@pytest.mark.thorough
def test_step_measures_fewer_bytes_beside(tmp_path: Path) -> None:
    content, printed = measured(
        "step/step.py",
        tmp_path / "step.json",
        *("--models", "mlp", "--rounds", "2", "--builds", "1"),
        *("--families", "copies", "bf16", "fp16", "int8"),
    )
    result = content["models"]["mlp"]
    full = 4 * (PARAMETERS["mlp"] + TENSORS["mlp"] + BYTES * 2)
    for name in ("ours bf16", "ours fp16"):
        assert 0 < result["gradients"][name]["error"] < 1e-2
        assert result["wire_bytes"][name] == full / 2
    # In blocks of 256 and a scale, and those of one dimension in fp32; of two ranks each sends half
    # of an all-to-all and of an all-gather.
    numbers = 12 * 512 * 512
    least = numbers * 260 // 256 + 4 * (PARAMETERS["mlp"] - numbers)
    assert least < result["sent_bytes"]["ours int8"] < 1.02 * least
    assert result["wire_bytes"]["ours int8"] == 2 * result["sent_bytes"]["ours int8"]
    assert 0 < result["gradients"]["ours int8"]["error"] < 5e-2
    assert all(each["same_on_all_ranks"] for each in result["gradients"].values())
    assert "ours int8" in printed


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--models", "nothing"]])
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    script = ROOT / "benchmarks" / "step" / "step.py"
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert arguments[0] in done.stderr
