"""The pytest-benchmark suites run, and write the JSON that others read."""

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
TESTS = {"kernels": "kernels/test_bandwidth.py", "host": "host"}
HEADING = {"benchmark", "machine", "load_average_after", "benchmarks"}


def run(suite, tmp_path, *arguments):
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += [f"benchmarks/{TESTS[suite]}"]
    command += ["--benchmark-only", f"--benchmark-json={result}", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)  # pytest-benchmark would measure nothing
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(result.read_text())
    assert content["benchmark"] == suite
    assert set(content) >= HEADING
    assert content["machine"]["torch"]
    return content["benchmarks"], done.stdout


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    return run("kernels", folder, "-k", "many_small-bf16", "--rounds", "2")


@pytest.mark.long
def test_kernels_are_reported_as_shares_of_a_copy(kernels):
    rows, output = kernels
    assert "share of the copy" in output
    facts = {(row["extra_info"]["direction"], row["extra_info"]["contender"]): row for row in rows}
    for direction in ("flatten", "unflatten"):
        row = facts[direction, "tritonddp"]
        assert len(row["stats"]["data"]) == 2
        info = row["extra_info"]
        assert row["group"] == f"{direction}-many_small-bf16-whole"
        assert (info["tensors"], info["bytes"]) == (1000, 2 * 2 * 64_000)
        # Replayed, not timed again: shares follow from the rounds in the file.
        ceiling = facts[direction, "device copy"]["stats"]["data"]
        shares = sorted(a / b for a, b in zip(ceiling, row["stats"]["data"], strict=True))
        assert abs(info["of_ceiling"]["median"] - sum(shares) / 2) < 1e-3


WITHOUT_PYTEST = """
import runpy, sys
sys.modules.update(pytest=None, pytest_benchmark=None)
sys.path.insert(0, sys.argv[1])
sys.argv[:] = ["plain.py", *sys.argv[2:]]
runpy.run_module("benchmarks.plain", run_name="__main__")
"""


@pytest.mark.long
def test_without_pytest_the_result_has_the_same_form(tmp_path, kernels):
    rows, _ = kernels
    result = tmp_path / "plain.json"
    arguments = ["kernels", "--only", "many_small-bf16", "--without", "wire", "--rounds", "2"]
    command = [sys.executable, "-c", WITHOUT_PYTEST, str(ROOT), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--out", str(result)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "share of the copy" in done.stdout
    content = json.loads(result.read_text())
    assert content["benchmark"] == "kernels"
    assert set(content) >= HEADING
    for ours, theirs in zip(content["benchmarks"], rows, strict=True):
        assert ours["group"] == theirs["group"]
        assert set(ours) == set(theirs)
        assert set(ours["stats"]) == set(theirs["stats"])
        assert set(ours["extra_info"]) == set(theirs["extra_info"])


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
    rows, _ = run("kernels", tmp_path, "-k", "many_small-bf16", "--rounds", "5000")
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
    for name in ("unwrapped", "stock", "ours", "ours views"):
        assert columns["parameter", name] == {"all", "hook"}
        assert columns["bucket", name] == {"all", "launch"}
        assert columns["step", name] == {"forward", "backward"}
