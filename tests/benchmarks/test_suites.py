"""The suites run, and write the JSON that others read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import plain
from benchmarks.base import deadline
from benchmarks.base.suite import Case, Row

ROOT = Path(__file__).parents[2]
HEADING = {"benchmark", "machine", "load_average_after", "benchmarks"}


def run(suite, tmp_path, *arguments):
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/plain.py", suite, *arguments, "--out", str(result)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(result.read_text())
    assert content["benchmark"] == suite
    assert set(content) >= HEADING
    assert content["machine"]["torch"]
    return content["benchmarks"], done.stdout


@pytest.mark.long
def test_kernels_are_reported_as_shares_of_a_copy(tmp_path):
    rows, output = run("kernels", tmp_path, "--only", "many_small-bf16", "--rounds", "2")
    assert "share of the copy" in output
    facts = {(row["extra_info"]["direction"], row["extra_info"]["contender"]): row for row in rows}
    for direction in ("flatten", "unflatten"):
        row = facts[direction, "tritonddp"]
        assert len(row["stats"]["data"]) == 2
        info = row["extra_info"]
        assert row["group"] == f"{direction}-many_small-bf16-whole"
        assert (info["tensors"], info["bytes"]) == (1000, 2 * 2 * 64_000)
        # Shares follow from the rounds in the file.
        ceiling = facts[direction, "device copy"]["stats"]["data"]
        shares = sorted(a / b for a, b in zip(ceiling, row["stats"]["data"], strict=True))
        assert abs(info["of_ceiling"]["median"] - sum(shares) / 2) < 1e-3


def test_a_group_that_fails_does_not_take_the_others_with_it(tmp_path, monkeypatch, capsys):
    def row(case, rounds, groups_left):
        if case.group == "b":
            raise RuntimeError("no such thing")
        return Row([1.0], {})

    names = (("a", "1"), ("a", "2"), ("b", "1"), ("b", "2"), ("c", "1"))
    cases = [Case(group, (), f"{group}-{number}") for group, number in names]
    suite = SimpleNamespace(cases=lambda: cases, row=row, TABLES=())
    monkeypatch.setattr(plain.importlib, "import_module", lambda name: suite)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["plain.py", "kernels", "--out", str(tmp_path / "result")])
    assert plain.main() == 1
    content = json.loads((tmp_path / "result").read_text())
    assert [row["name"] for row in content["benchmarks"]] == ["a-1", "a-2", "c-1"]
    assert content["failed"] == {"b": "RuntimeError: no such thing"}
    assert "FAILED b: RuntimeError: no such thing" in capsys.readouterr().out


@pytest.mark.thorough
def test_late_kernels_have_few_rounds(tmp_path, monkeypatch):
    monkeypatch.setenv(deadline.VARIABLE, "0")
    rows, _ = run("kernels", tmp_path, "--only", "many_small-bf16", "--rounds", "5000")
    assert {row["stats"]["rounds"] for row in rows} == {deadline.LEAST_ROUNDS}


@pytest.mark.thorough
def test_host_cost_is_reported_for_stock_and_ours(tmp_path):
    rows, output = run("host", tmp_path, "--rounds", "2")
    assert "us, median (quartiles)" in output
    columns = {
        (row["extra_info"]["kind"], row["extra_info"]["configuration"]): set(
            row["extra_info"]["us"]
        )
        for row in rows
    }
    for name in ("unwrapped", "stock", "ours", "ours idle", "ours views"):
        assert columns["parameter", name] == {"all", "hook"}
        assert columns["bucket", name] == {"all", "launch"}
        assert columns["step", name] == {"forward", "backward"}
