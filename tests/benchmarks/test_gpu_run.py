"""`make gpu` goes on whatever its parts do, and says what was met, missed and not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.base import processes
from benchmarks.gpu import gpu, one_card
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu.parts import Part, read_json, read_tests
from benchmarks.gpu.summary import summary
from benchmarks.report import bounds as gpu_bounds
from benchmarks.report.tables import CEILING

ROOT = Path(__file__).parents[2]
BOOM = "exit status 1; RuntimeError: boom"


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu.Report:
    monkeypatch.setattr(processes, "GRACE", 0.5)
    return gpu.Report(tmp_path / "card" / "gpu.json", {"gpu": None}, False, time.monotonic() + 600)


def script(name: str, code: str, limit: float = 60, **options: Any) -> Part:
    command = (sys.executable, "-c", code, "{result}")
    return Part(name, name, limit, 1, command, read_json, **options)


@pytest.mark.parametrize("cards", [1, 2, 8])
def test_all_limits_together_are_under_ten_minutes(cards: int) -> None:
    parts = [gpu.DESCRIBE, *(each for each in gpu_parts.parts(cards=cards) if not each.on_request)]
    assert sum(part.limit for part in parts) <= gpu.BUDGET <= 9 * 60
    first = [part.name for part in parts].index("host")
    assert sum(part.limit for part in parts[:first]) <= 4 * 60
    # What adapts to the time it has is asked to end early; what does not takes less, as far as is
    # known.
    assert all(part.estimate < part.limit for part in parts)
    # Only the last part can be interrupted as late as that: two graces, for it and for the plots.
    ends = gpu.BUDGET + gpu.PLOTS + 4 * processes.GRACE
    makefile = (ROOT / "Makefile").read_text()
    (timeout,) = re.findall(r"timeout -k \d+ (\d+) \S+ benchmarks/gpu", makefile)
    assert ends <= int(timeout) < 600


TESTS_LAST = ("test-kernels", "test-nccl-1", "test-nccl-2")
ON_REQUEST = ["step-wires", "step-compiled", "quantize", "memcheck"]


def test_parts_come_in_the_order_of_what_a_user_came_for() -> None:
    for cards, exchange, pair in (
        (1, ["step-simulated"], ["probe", "step-pair"]),
        (2, ["step-cards-2"], []),
        (8, ["step-cards-2", "step-cards-4", "step-cards-8"], []),
    ):
        found = gpu_parts.parts(cards=cards)
        first = ["sanity", "step-training", *exchange, "host", "host-steps", *pair]
        last = ["kernels", "step-graphs", *TESTS_LAST, "memory"]
        assert [part.name for part in found if not part.on_request] == [*first, *last]
        assert [part.name for part in found if part.on_request] == ON_REQUEST
    assert sum(part.limit for part in (gpu.DESCRIBE, gpu_parts.parts()[0])) < 90


def test_a_rehearsal_runs_the_same_commands() -> None:
    real = {part.name: part for part in (*gpu_parts.parts(), *gpu_parts.parts(cards=2))}
    for part in gpu_parts.parts(rehearse=True):
        if part.name != "memcheck":  # there is no compute-sanitizer
            command = tuple(each for each in part.command if each != str(gpu_parts.REHEARSE))
            assert command[: len(real[part.name].command)] == real[part.name].command


@pytest.mark.long
def test_a_part_that_fails_or_hangs_does_not_stop_the_others(report: gpu.Report) -> None:
    write = "import sys, json; json.dump({'n': 1}, open(sys.argv[1], 'w'))"
    silent = "it said nothing of an error"
    cases: list[tuple[Part, tuple[str, str | None, Any]]] = [
        (
            script("raises late", f"{write}; raise RuntimeError('boom')"),
            ("failed", BOOM, {"n": 1}),
        ),
        # (What hangs has as long again, which others have left.)
        (
            script("hangs", "import time; time.sleep(300)", limit=5),
            ("failed", f"ran longer than 10 s; {silent}", None),
        ),
        (script("writes nothing", "pass"), ("failed", "it wrote no result", None)),
        (
            script("needs more", "pass", needs=("no_such_module",)),
            ("not run", "no_such_module is not installed", None),
        ),
        (script("works", write), ("ok", None, {"n": 1})),
    ]
    for part, _ in cases:
        report.run(part)
    parts = json.loads(report.path.read_text())["parts"]
    found = {n: (each["status"], each["reason"], each["result"]) for n, each in parts.items()}
    assert found == {part.name: expected for part, expected in cases}
    assert "\n".join(summary(report.content))


def test_two_ranks_on_one_card_are_asked_for_first(
    report: gpu.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(one_card.ANSWER, "not yet asked")
    refuse = "print('NCCL WARN Duplicate GPU detected', flush=True); exit(1)"
    report.run(replace(gpu_parts.PROBE, command=(sys.executable, "-c", refuse)))
    report.run(script("pair", "exit(1)", ranks=2, on_one_card=True))
    for name in ("probe", "pair"):
        part = report.content["parts"][name]
        assert (part["status"], part["reason"]) == ("not run", "NCCL: Duplicate GPU detected")
    agree = f"print('{one_card._SUM}')"
    report.run(replace(gpu_parts.PROBE, command=(sys.executable, "-c", agree)))
    assert report.content["parts"]["probe"]["status"] == "ok"
    assert one_card.refusal() is None


# Not the tests of tests/gpu, which CI runs by themselves, nor twice what is measured alike.
IN_CI = ["host-steps", "step-graphs", "step-simulated", "step-cards-2", "kernels", "memory"]


@pytest.mark.parametrize(
    "only",
    [
        pytest.param(IN_CI, id="some parts", marks=pytest.mark.long),
        pytest.param(
            [part.name for part in gpu_parts.parts(True)],
            id="all",
            marks=[pytest.mark.thorough, pytest.mark.timeout(2400)],
        ),
    ],
)
def test_the_rehearsal(only: list[str], tmp_path: Path) -> None:
    """Parts run as on a GPU, on the recorded device."""
    script = str(ROOT / "benchmarks" / "gpu" / "gpu.py")
    command = [sys.executable, script, "--rehearse", "--only", *only]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    result = tmp_path / "rehearsal" / "gpu.json"
    lines = done.stdout.splitlines()
    assert lines[-1] == f"written to {result}"
    screen = lines[[line.startswith("REHEARSAL") for line in lines].index(True) :]
    assert "NO FIGURE BELOW MEANS ANYTHING" in screen[0]
    assert any(line.startswith("SIMULATION of 8 ranks on one card") for line in screen)
    assert len(screen) <= 80
    content = json.loads(result.read_text())
    assert content["rehearsal"] is True
    names = ["describe", *(each.name for each in gpu_parts.parts(True) if each.name in only)]
    assert {name: part["status"] for name, part in content["parts"].items()} == dict.fromkeys(
        names, "ok"
    )
    assert len(content["bounds"]) == len(gpu_bounds.BOUNDS)
    for name in names:
        assert any(re.match(rf"{name} +ok +\d", line) for line in screen)
    # Nothing was passed over: what only a GPU has is in the results.
    results = {name: part["result"] for name, part in content["parts"].items()}
    contenders = {row["extra_info"]["contender"] for row in results["kernels"]["benchmarks"]}
    assert {"tritonddp, moved", gpu_bounds.SM_COPY} < contenders
    simulated = results["step-simulated"]
    assert {"unwrapped again", "stock", "ours"} < set(
        simulated["models"]["mlp"]["samples"]["inf GB/s"]
    )
    assert min(simulated["carried"].values()) > 0
    steps = results["host-steps"]["models"]["mlp"]
    assert steps["launches"]["ours"]
    assert {"unwrapped again", "stock sized", "stock sized views"} < set(steps["seconds"])
    # What is compared sends, and what is idle does not.
    for step in (results[name] for name in names):
        for model in step.get("models", {}).values() if isinstance(step, dict) else ():
            for one in model.get("comparisons", {}).values():
                assert model["wire_bytes"][one["contender"]] > 0 < model["wire_bytes"][one["best"]]
    assert steps["wire_bytes"]["ours idle"] == 0
    assert results["step-cards-2"]["world_size"] == 2
    assert results["step-cards-2"]["models"]["mlp"]["exposed"]["ours"] > 0
    graphs = results["step-graphs"]["models"]["mlp"]
    assert set(graphs["seconds"]) >= {"unwrapped", "stock", "ours", "ours idle"}
    # (Whether its bound holds says nothing here: tables of addresses are larger than so few
    # gradients.)
    assert results["memory"]["models"]["mlp"]["ours"]["drift"] == 0


TESTS = """<testsuites><testsuite>
<testcase classname="test_it" name="test_some[views-nccl-1-rank]"/>
<testcase classname="test_it" name="test_some[views-nccl-2-ranks]">
<skipped message="NCCL: Duplicate GPU detected"/></testcase>
<testcase classname="test_it" name="test_some[views-gloo-cpu]"><failure message="no"/></testcase>
<testcase classname="tests.test_it" name="test_plain"/>
</testsuite></testsuites>"""


def test_a_test_report_is_counted_by_world(tmp_path: Path) -> None:
    xml = tmp_path / "result"
    xml.write_text(TESTS)
    outcome = read_tests(xml, [1], "", 60)
    assert (outcome.status, outcome.reason) == ("failed", "1 tests failed")
    assert outcome.result == {
        "groups": {
            "nccl-1-rank": {"passed": 1},
            "nccl-2-ranks": {"skipped": 1},
            "gloo-cpu": {"failed": 1},
            "test_it": {"passed": 1},
        },
        "skipped": {"nccl-2-ranks": {"NCCL: Duplicate GPU detected": 1}},
        "failed": ["test_some[views-gloo-cpu]"],
    }
    shown = screen({"t": part(outcome.result, "failed", outcome.reason)})
    assert re.search(r"t +failed .* nccl-2-ranks 1 not run: NCCL: Duplicate GPU detected", shown)
    # Cut off: what had been run is still told, and so is that it was cut off.
    cut = read_tests(xml, [None], "", 60)
    assert (cut.status, cut.result) == ("failed", outcome.result)
    assert "ran longer than 60 s" in str(cut.reason)


# Bounds


def row(contender: str, share: float, **others: Any) -> dict[str, Any]:
    info = {"direction": "flatten", "parameters": "resnet50", "dtype": "fp32", "bucket": "whole"}
    info |= {"bytes": 2 * 102e6, **others, "contender": contender, "gb_per_s": 4000 * share}
    info["of_ceiling"] = {"median": share, "low": share, "high": share}
    group = "-".join(str(info[key]) for key in ("direction", "parameters", "dtype"))
    return {"group": group, "extra_info": info}


def part(result: Any, status: str = "ok", reason: str | None = None) -> dict[str, Any]:
    times = {"seconds": 1.0, "limit": 20.0, "estimate": 10.0}
    return {"status": status, "reason": reason, "result": result, **times}


def screen(parts: dict[str, Any]) -> str:
    return "\n".join(summary({"rehearsal": False, "parts": parts, "bounds": []}))


def judged(**parts: Any) -> list[tuple[str, Any]]:
    found = gpu_bounds.bounds({name.replace("_", "-"): each for name, each in parts.items()})
    return [(each["verdict"], each["worst"] and each["worst"]["value"]) for each in found]


def kernels(ours: float, small: float) -> dict[str, Any]:
    many = {"parameters": "many_small", "bytes": 2 * 256e3}
    return {
        "benchmarks": [
            *[row(gpu_bounds.OURS, ours), row(gpu_bounds.FOREACH_DIV, 0.5), row(CEILING, 1.0)],
            row(gpu_bounds.SM_COPY, 1.25),
            *[row(gpu_bounds.OURS, small, **many), row(CEILING, 1.0, **many)],
        ]
    }


def step(bound: float = 1.0, sent: int = 8, **models: tuple[float, str]) -> dict[str, Any]:
    spreads = {name: {"median": 0.01} for name in ("unwrapped", "stock views", "ours views")}
    return {
        "models": {
            name: {
                "comparisons": {
                    "views": {
                        "best": "stock views",
                        "contender": "ours views",
                        "bound": bound,
                        "overhead": overhead,
                        "verdict": verdict,
                    }
                },
                "step_seconds": spreads,
                "raw_seconds_per_rank": [{"ours views": [[0.01] * 12]}],
                "wire_bytes": {"stock views": 8, "ours views": sent},
            }
            for name, (overhead, verdict) in models.items()
        }
    }


def test_bounds_are_met_missed_or_not_run() -> None:
    steps = step(mlp=(0.4, "met"))
    steps["models"]["bad"] = {"error": "gradients differ"}
    assert judged(kernels=part(kernels(0.95, 0.6)), step=part(steps))[1:6] == [
        ("met", 0.4),
        ("met", 0.95),
        ("missed", pytest.approx(0.76)),
        ("met", pytest.approx(1.9)),
        ("met", pytest.approx(1 / 0.6)),
    ]
    assert judged(kernels=part(kernels(0.7, 0.25)))[2:6] == [
        ("missed", 0.7),
        ("missed", pytest.approx(0.56)),
        ("missed", pytest.approx(1.4)),
        ("missed", pytest.approx(4.0)),
    ]
    assert judged(step_wires=part(step(0.5, a=(0.1, "too noisy"))))[0] == ("too noisy", 0.1)
    assert judged() == [("not run", None)] * len(gpu_bounds.BOUNDS)


def test_a_bound_tells_what_was_not_measured() -> None:
    small = step(a=(0.6, "missed"), b=(0.9, "too noisy"), c=(0.3, "met"))
    wires = part(None, "failed", "ran longer than 75 s")
    found = gpu_bounds.bounds({"step": part(small), "step-wires": wires, "step-graphs": part({})})
    bound = found[1]
    assert (bound["verdict"], bound["met_by"], bound["of"]) == ("missed", 1, 3)
    assert bound["worst"] == {"value": 0.6, "where": "step a views", "verdict": "missed"}
    assert bound["not_run"] == ["step-wires: ran longer than 75 s"]


@pytest.mark.parametrize(
    ("noise", "rounds", "expected"),
    [(0.5, 12, "missed"), (6.4, 12, "too noisy"), (0.5, 9, "too few rounds")],
)
def test_a_second_bare_model_says_what_the_host_s_rows_resolve(
    noise: float, rounds: int, expected: str
) -> None:
    def row(name: str, us: float) -> dict[str, Any]:
        spread = {"q1": us, "median": us, "q3": us}
        info = {"kind": "parameter", "configuration": name, "us": {"all": spread}}
        return {"extra_info": info, "stats": {"rounds": rounds}}

    host = part({"benchmarks": [row("unwrapped", noise), row("ours", 8.0), row("ours idle", 9.0)]})
    assert judged(host=host)[-1] == (expected, 8.0)
