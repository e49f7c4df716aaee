"""Each benchmark runs once, small: what it counts is right, and what it writes is whole."""

import importlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import hosts_or_skip
from launched import ROOT, run
from training import HEADER_BYTES

Content = dict[str, Any]


def measured(
    command: str, out: Path, nproc: int | None = 2, root: Path = ROOT
) -> tuple[Content, str]:
    """The result file of a run on the CPU that must succeed, and the output of the run.

    Args:
        command: the script in ``benchmarks``, and its arguments.
        nproc: ranks; ``None`` for a script that starts them itself, or has none.
        root: the tree of the script.
    """
    script, *arguments = shlex.split(command)
    done = run(
        *(root / "benchmarks" / script, *arguments, "--out", out),
        nproc=nproc,
        env={"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


PARAMETERS = {"mlp": 12 * (512 * 512 + 512), "branchy": 400 * (32 * 32 + 32)}
TENSORS = {"mlp": 24, "branchy": 800}


def check_step(content: Content) -> None:
    ((name, result),) = content["models"].items()
    assert result["rounds"] == [2]
    configurations = list(result["seconds"])
    assert {"unwrapped", "stock again", "ours", "ours views"} <= set(configurations)
    assert all(each["same_bits"] for each in result["gradients"].values())
    for configuration in configurations:
        is_ours = configuration.startswith("ours")
        searches = "find_unused" in configuration or (
            configuration.startswith("stock") and name == "branchy"
        )
        expected = 4 * PARAMETERS[name] + 4 * TENSORS[name] * (searches or is_ours)
        expected += 4 * HEADER_BYTES * 2 * is_ours  # the headers of two ranks
        if configuration == "unwrapped":
            expected = 0
        # Of two ranks each sends 2 (2 - 1) / 2 of an all-reduce; through memory nothing is.
        by_group = configuration != "unwrapped" and not is_ours
        assert result["wire_bytes"][configuration] == expected, configuration
        assert result["sent_bytes"][configuration] == expected * by_group, configuration
        assert result["collectives"][configuration] == (2 + searches) * by_group, configuration
    for one in result["comparisons"].values():
        assert one["bound"] == (0.9 if name == "branchy" else 1.02)


def check_fewer_bytes(content: Content) -> None:
    result = content["models"]["mlp"]
    full = 4 * (PARAMETERS["mlp"] + TENSORS["mlp"] + HEADER_BYTES * 2)
    assert result["wire_bytes"]["ours bf16"] == full / 2
    # In blocks of 256 and a scale, and those of one dimension in fp32; of two ranks each sends half
    # of an all-to-all and of an all-gather.
    numbers = 12 * 512 * 512
    least = numbers * 260 // 256 + 4 * (PARAMETERS["mlp"] - numbers)
    assert least < result["sent_bytes"]["ours int8"] < 1.02 * least
    assert 0 < result["gradients"]["ours int8"]["error"] < 5e-2
    assert all(each["same_on_all_ranks"] for each in result["gradients"].values())


def check_errors(content: Content) -> None:
    (task,) = content["tasks"].values()
    (exact,), (int8,), (without,), (two,), (everything,) = task["errors"].values()
    assert exact["whole"] < 1e-6
    # What is left out of a gradient is in the next one: its own error is larger, not the sum's.
    assert without["whole"] < int8["whole"] < 0.05
    assert int8["sum"] < 0.5 * without["sum"]
    assert int8["tensors"] < 0.6 * everything["tensors"]
    assert two["whole"] < int8["whole"]
    sent = task["sent_bytes"]
    assert sent["two levels: int8"] < 0.3 * sent["int8"]
    assert sent["int8 of everything"] < 0.8 * sent["int8"]


def check_network(content: Content) -> None:
    limited, unlimited = content["results"]
    payload = 4 * PARAMETERS["mlp"]
    # A line of 1 Gbit/s carries 12.6 MB in 105 ms, and nobody is much faster than that. (What it
    # lets through at once after each of a busy machine's pauses counts as carried.)
    assert limited["limit_parts"]["limit"]["line"] == pytest.approx(0.1045, rel=0.05)
    for name, one in limited["contenders"].items():
        assert name == "unwrapped" or one["over"]["limit"] > 0.6, name
    for name, one in unlimited["contenders"].items():  # what is sent again counts too
        assert name == "unwrapped" or payload < one["tx_bytes"] < 1.2 * payload, name


STEP = "step/step.py --rounds 2 --builds 1 --models"
WIRES = "fp32 int8 'int8 without feedback' 'two levels: int8' 'int8 of everything'"
NETWORK = "network/network.py --models mlp --hosts 2 --rounds 2 --rates 1gbit none"
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("command", "nproc", "check"),
    [
        pytest.param(f"{STEP} branchy", 2, check_step, marks=pytest.mark.long),
        pytest.param(f"{STEP} mlp", 2, check_step, marks=THOROUGH),
        pytest.param(
            f"{STEP} mlp --families copies bf16 int8", 2, check_fewer_bytes, marks=THOROUGH
        ),
        pytest.param(
            f"convergence/errors.py --steps 12 --seeds 3 --wires {WIRES}",
            4,
            check_errors,
            marks=THOROUGH,
        ),
        pytest.param(NETWORK, None, check_network, marks=THOROUGH),
    ],
)
def test_a_benchmark_counts_right(
    command: str, nproc: int | None, check: Callable[[Content], None], tmp_path: Path
) -> None:
    if command == NETWORK:
        with hosts_or_skip(2):
            pass
    content, _ = measured(command, tmp_path / "result.json", nproc=nproc)
    assert content["machine"]["torch"] == torch.__version__
    check(content)


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
            "PYTEST_XDIST_WORKER": "",  # beside other tests the library would time nothing
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
    directions = ("flatten", "unflatten", "quantize", "reduce", "dequantize")
    assert set(groups) == {f"{direction} {bucket}" for direction in directions}
    for group in groups.values():
        assert {"device copy", "tritonddp"} < set(group)
        assert "idle" not in group, "what is wrong was timed"
        copy = group["device copy"]["stats"]["min"]
        for row in group.values():
            info, least = row["extra_info"], row["stats"]["min"]
            assert info["of_copy"] == pytest.approx(copy / least)
            assert info["gb_per_s"] == pytest.approx(info["bytes"] / least / 1e9)
    flatten = groups[f"flatten {bucket}"]["tritonddp"]["extra_info"]
    assert flatten["bytes"] == 2 * 2 * 64_000


@pytest.mark.thorough
def test_a_planted_slowdown_is_found(tmp_path: Path) -> None:
    """By the tree against its commit; it sleeps in every flatten."""
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
        ("step.step", "--rounds 0", "should be at least 1"),
        ("step.compare", "--base no-such-revision", "'no-such-revision' names no commit of"),
        ("network.network", "--rates 1gb", "neither a rate such as 1gbit nor none"),
        ("network.network", "--hosts 1", "neither a number from 2 to 250 nor as 2x4"),
        ("report.report", "--check --from local", "--from goes with --figures"),
    ],
)
def test_wrong_arguments_are_refused(
    module: str,
    arguments: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments.split()])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        status = importlib.import_module(f"benchmarks.{module}").main()
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert text in capsys.readouterr().err
