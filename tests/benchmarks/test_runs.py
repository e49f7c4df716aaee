"""Each benchmark runs once at a small size, with correct counts and complete results."""

import importlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import ROOT, run
from training import HEADER_BYTES

Content = dict[str, Any]


def measured(command: str, out: Path, root: Path = ROOT) -> tuple[Content, str]:
    """Run a command of ``benchmarks`` in the tree ``root``; return its results and its output."""
    script, *arguments = shlex.split(command)
    done = run(
        *(root / "benchmarks" / script, *arguments, "--out", out),
        nproc=2,
        env={"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


PARAMETERS, TENSORS = 400 * (32 * 32 + 32), 800  # of the model "branchy"


@pytest.mark.long
def test_steps_are_timed_and_count_right(tmp_path: Path) -> None:
    command = "step/step.py --rounds 2 --builds 1 --models branchy"
    content, _ = measured(command, tmp_path / "result.json")
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
    assert "1 failed" in done.stdout
    content = json.loads(out.read_text())
    assert content["machine"]["torch"] == content["machine_info"]["torch"] == torch.__version__
    groups: dict[str, dict[str, Any]] = {}
    for row in content["benchmarks"]:
        assert row["stats"]["rounds"] == len(row["stats"]["data"]) == 2
        groups.setdefault(row["group"], {})[row["extra_info"]["contender"]] = row
    assert len(groups) == 5
    for group in groups.values():
        assert {"device copy", "tritonddp"} < set(group)
        assert "idle" not in group, "a wrong kernel was timed"
    ours = groups[f"flatten {bucket}"]["tritonddp"]
    info, least = ours["extra_info"], ours["stats"]["min"]
    assert info["bytes"] == 2 * 2 * 64_000
    assert info["gb_per_s"] == pytest.approx(info["bytes"] / least / 1e9)


@pytest.mark.thorough
def test_a_planted_slowdown_is_found(tmp_path: Path) -> None:
    """A sleep in each flatten, in the working tree compared with its commit."""
    folder = tmp_path / "repository"
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in ("tritonddp", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "base"]):
        subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)
    bucket = folder / "tritonddp" / "buckets" / "bucket.py"
    source = bucket.read_text()
    line = "        self._counters.flattens += 1\n"
    planted = source.replace(line, f"{line}        __import__('time').sleep(0.3)\n")
    assert planted != source
    bucket.write_text(planted)
    command = "step/compare.py --base HEAD --models many_small --rounds 5 --builds 1"
    content, printed = measured(command, tmp_path / "compare.json", root=folder)
    for one in content["models"]["many_small"]["comparisons"].values():
        assert one["ours"]["median"] > 1.5
        assert one["verdict"] == "slower"
    assert "\nslower than the base: many_small copies" in printed
    assert "\nfaster than the base: none" in printed


@pytest.mark.parametrize(
    ("module", "arguments", "text"),
    [
        ("step.compare", "--base no-such-revision", "'no-such-revision' names no commit of"),
        ("network.network", "--rates 1gb", "neither a rate such as 1gbit nor none"),
    ],
)
def test_wrong_arguments_are_refused(
    module: str, arguments: str, text: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments.split()])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        status = importlib.import_module(f"benchmarks.{module}").main()
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert text in capsys.readouterr().err
