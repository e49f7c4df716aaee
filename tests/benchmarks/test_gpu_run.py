"""``make gpu`` continues if a part fails, and reports the parts that failed or did not run."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launched import ROOT

from benchmarks.base import processes
from benchmarks.gpu import gpu
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu.gpu import summary
from benchmarks.gpu.parts import Part, read_json


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu.Report:
    monkeypatch.setattr(processes, "GRACE", 0.5)
    return gpu.Report(tmp_path / "card" / "gpu.json", {"gpu": None}, False, time.monotonic() + 600)


def script(name: str, code: str, limit: float = 60, **options: Any) -> Part:
    command = (sys.executable, "-c", code, "{result}")
    return Part(name, name, limit, 1, command, read_json, **options)


@pytest.mark.parametrize("cards", [1, 8])
def test_all_limits_together_are_under_ten_minutes(cards: int) -> None:
    parts = [gpu.DESCRIBE, *gpu_parts.parts(cards=cards)]
    assert sum(part.limit for part in parts) <= gpu.BUDGET
    makefile = (ROOT / "Makefile").read_text()
    (timeout,) = re.findall(r"timeout -k \d+ (\d+) \S+ benchmarks/gpu", makefile)
    assert gpu.BUDGET + gpu.PLOTS + 4 * processes.GRACE <= int(timeout) < 600


def test_the_tests_that_the_sanity_part_names_exist() -> None:
    """``pytest -k`` ignores unknown names."""
    twins = ROOT / "tests" / "kernels" / "against_twins.py"
    paths = (*gpu_parts.KERNEL_TESTS, *gpu_parts.NCCL_TESTS, twins)
    text = "".join(path.read_text() for path in paths)
    for name in f"{gpu_parts.SANITY} or {gpu_parts.SANITY_NCCL}".split(" or "):
        assert re.search(rf"^def test_\w*{name}", text, re.MULTILINE), name


@pytest.mark.long
def test_a_part_that_fails_or_hangs_does_not_stop_the_others(report: gpu.Report) -> None:
    write = "import sys, json; json.dump({'n': 1}, open(sys.argv[1], 'w'))"
    boom = "exit status 1; RuntimeError: boom"
    hung = "ran longer than 10 s; it said nothing of an error"
    missing = "no_such_module is not installed"
    cases: list[tuple[Part, tuple[str, str | None, Any]]] = [
        (script("raises", f"{write}; raise RuntimeError('boom')"), ("failed", boom, {"n": 1})),
        # A part may use the time that other parts have left.
        (script("hangs", "import time; time.sleep(300)", limit=5), ("failed", hung, None)),
        (script("needs", "pass", needs=("no_such_module",)), ("not run", missing, None)),
        (script("works", write), ("ok", None, {"n": 1})),
    ]
    for part, _ in cases:
        report.run(part)
    parts = json.loads(report.path.read_text())["parts"]
    found = {n: (each["status"], each["reason"], each["result"]) for n, each in parts.items()}
    assert found == {part.name: expected for part, expected in cases}
    assert "\n".join(summary(report.content))


# Other parts run the tests of tests/gpu, which CI runs separately.
PARTS = ["host-steps", "step-simulated", "step-cards-2", "kernels", "memory"]


@pytest.mark.long
def test_the_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts run as on a GPU, on the recorded device."""
    pytest.importorskip("pytest_benchmark", reason="needs the extra [bench]")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # kernels are timed by pytest
    script = str(ROOT / "benchmarks" / "gpu" / "gpu.py")
    command = [sys.executable, script, "--rehearse", "--only", *PARTS]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    lines = done.stdout.splitlines()
    screen = lines[[line.startswith("REHEARSAL") for line in lines].index(True) :]
    assert any(line.startswith("SIMULATION of 8 ranks on one card") for line in screen)
    assert len(screen) <= 80
    content = json.loads((tmp_path / "rehearsal" / "gpu.json").read_text())
    statuses = {name: part["status"] for name, part in content["parts"].items()}
    assert statuses == dict.fromkeys(("describe", *PARTS), "ok")
    # The results contain what only a GPU has.
    results = {name: part["result"] for name, part in content["parts"].items()}
    contenders = {row["extra_info"]["contender"] for row in results["kernels"]["benchmarks"]}
    assert {"tritonddp, moved", "SM copy"} < contenders
    assert all(row["extra_info"]["on_device"] for row in results["kernels"]["benchmarks"])
    assert min(results["step-simulated"]["carried"].values()) > 0
    steps = results["host-steps"]["models"]["mlp"]
    assert steps["launches"]["ours"]
    assert {"unwrapped again", "stock sized", "stock sized views"} < set(steps["seconds"])
    assert steps["wire_bytes"]["ours idle"] == 0
    assert results["step-cards-2"]["models"]["mlp"]["exposed"]["ours"] > 0
    assert results["memory"]["models"]["mlp"]["ours"]["drift"] == 0
