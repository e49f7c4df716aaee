"""Each benchmark runs once at a small size, with correct counts and complete results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import ROOT, run
from training import HEADER_BYTES

PARAMETERS, TENSORS = 400 * (32 * 32 + 32), 800  # of the model "branchy"


@pytest.mark.long
def test_steps_are_timed_and_count_right(tmp_path: Path) -> None:
    out, script = tmp_path / "result.json", ROOT / "benchmarks" / "step" / "step.py"
    options = ("--rounds", "2", "--builds", "1", "--models", "branchy", "--out", out)
    env = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = run(script, *options, env=env, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert content["machine"]["torch"] == torch.__version__
    ((_, result),) = content["models"].items()
    assert result["rounds"] == [2]
    configurations = list(result["seconds"])
    assert {"unwrapped", "stock again", "ours", "ours views"} <= set(configurations)
    assert all(each["same_bits"] for each in result["gradients"].values())
    for configuration in configurations:
        is_ours = configuration.startswith("ours")
        searches = "find_unused" in configuration or configuration.startswith("stock")
        expected = 4 * PARAMETERS + 4 * TENSORS * (searches or is_ours)
        expected += 4 * HEADER_BYTES * 2 * is_ours  # the headers of two ranks
        if configuration == "unwrapped":
            expected = 0
        # Each of two ranks sends an all-reduce once; through memory, ranks send nothing.
        by_group = configuration != "unwrapped" and not is_ours
        assert result["wire_bytes"][configuration] == expected, configuration
        assert result["sent_bytes"][configuration] == expected * by_group, configuration
        assert result["collectives"][configuration] == (2 + searches) * by_group, configuration
    assert {one["bound"] for one in result["comparisons"].values()} == {0.9}


@pytest.mark.long
def test_kernels_are_timed_by_pytest_benchmark_once_they_are_right(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark", reason="needs the extra [bench]")
    out, bucket = tmp_path / "kernels.json", "many_small-bf16-whole"
    planted = "from benchmarks.kernels.contenders import DIRECTIONS as every\n"
    planted += "every['flatten'].ways['idle'] = lambda inputs: None\n"
    (tmp_path / "planted.py").write_text(planted)
    done = run(
        *("-m", "pytest", "-p", "planted", "-p", "no:cacheprovider", ROOT / "benchmarks/kernels"),
        *("-k", bucket, "--benchmark-only", f"--benchmark-json={out}"),
        *("--benchmark-max-time=0", "--benchmark-min-rounds=2"),
        nproc=None,
        env={
            "CUDA_VISIBLE_DEVICES": "",
            "PYTEST_XDIST_WORKER": "",  # with xdist, the library would time nothing
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
        },
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "64000 of 64000 elements are wrong" in done.stdout
    assert f"test_kernel[flatten-{bucket}-idle]" in done.stdout
    groups: dict[str, dict[str, Any]] = {}
    for row in json.loads(out.read_text())["benchmarks"]:
        groups.setdefault(row["group"], {})[row["extra_info"]["contender"]] = row
    assert len(groups) == 5
    for group in groups.values():
        assert {"device copy", "tritonddp"} < set(group)
        assert "idle" not in group, "a wrong kernel was timed"
    ours = groups[f"flatten {bucket}"]["tritonddp"]
    info, least = ours["extra_info"], ours["stats"]["min"]
    assert info["bytes"] == 2 * 2 * 64_000
    assert info["gb_per_s"] == pytest.approx(info["bytes"] / least / 1e9)
