"""scale.py on results that are made up: its predictions by hand, and what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.base.results import Result
from benchmarks.network import scale
from benchmarks.network.line import FRAME_BYTES, FRAME_PAYLOAD
from benchmarks.report import tables as report_tables
from benchmarks.report.table import markdown
from tritonddp.features.auto_compression.cost_model import (
    Kernel,
    Kind,
    Load,
    Speed,
    passage,
)

FRAMED = FRAME_BYTES / FRAME_PAYLOAD
# Elements of each gradient, and whether it is exact. Two buckets in fp32, three in int8.
GRADIENTS = [(100_000, False), (100, True), (500_000, False), (400_000, False)]
COUNTS = {"ours fp32": [2, 2], "ours bf16": [4], "ours int8": [2, 1, 1], "ours auto": [2, 1, 1]}
# Seconds of an empty collective and of a byte; kernels that take no time but int8's, which takes
# 1 ns an element in each of its steps.
CALL, BYTE, INT8 = 1e-4, 1e-9, 1e-9


def figures() -> dict[str, Any]:
    seconds: dict[str, float] = {}
    for name in ("all-reduce float32", "all-reduce bfloat16", "all-to-all uint8"):
        seconds |= {f"{name}: call": CALL, f"{name}: byte": BYTE, f"{name}: core": 0.0}
    seconds |= {f"all-gather uint8: {what}": 0.0 for what in ("call", "byte", "core")}
    for wire in ("float32", "bfloat16", "int8"):
        for step in ("fill", "reduce", "empty"):
            seconds[f"float32 as {wire}: {step}, launch"] = 0.0
            seconds[f"float32 as {wire}: {step}, element"] = INT8 if wire == "int8" else 0.0
    return {"world_size": 2, "cores": 1.0, "seconds": seconds, "took": 1.0}


def result(rate: float | None, **measured: float) -> dict[str, Any]:
    """A step that computes for 10 ms, of which gradients come at 4, 5, 8 and 10."""
    contenders = {"unwrapped": 0.01, **measured}
    return {
        "hosts": 2,
        "rate_bits_per_s": rate,
        "model": "made up",
        "payload_bytes": 4 * sum(size for size, _ in GRADIENTS),
        "gradient_bytes": [4 * size for size, _ in GRADIENTS],
        "gradient_ready_seconds": [0.004, 0.005, 0.008, 0.010],
        "contenders": {
            name: {"seconds": {"median": seconds}} for name, seconds in contenders.items()
        },
        "choice": {
            "figures": figures(),
            "gradient_exact": [exact for _, exact in GRADIENTS],
            "wire_counts": COUNTS,
            "chosen": [0, 2, 2],
        },
    }


def network(*results: dict[str, Any]) -> dict[str, Any]:
    return {"machine": {"usable_cores": 2}, "results": list(results)}


def sends(size: float, byte: float) -> float:
    """Seconds of an all-reduce between two ranks."""
    return CALL + size * byte


def test_steps_on_a_line_without_limit_by_hand() -> None:
    there = scale.scene(network(result(None)), 2)
    fp32 = there.buckets["ours fp32"]
    assert [(load.elements, load.exact) for load in fp32.loads] == [(100_000, 100), (900_000, 0)]
    assert list(fp32.compute.ready) == [0.005, 0.010]
    # The first bucket is through before the second is full, at the end of the compute.
    assert there.step("float32", 2) == pytest.approx(0.010 + sends(3.6e6, BYTE))
    assert there.step("bfloat16", 2) == pytest.approx(0.010 + sends(2 * 1_000_100, BYTE))
    assert there.all_reduce(2) == pytest.approx(2 * CALL + 4 * 1_000_100 * BYTE)
    # Filling, reducing and emptying take a nanosecond an element each, of the one core that the
    # backward has too; what is sent is hidden behind it.
    assert there.step("int8", 2) == pytest.approx(0.010 + 3 * 1_000_100 * INT8)


def test_a_slower_line_counts_and_a_faster_one_does_not() -> None:
    host = Speed(call=1e-4, byte=1e-9, core=5e-10)
    assert scale.on_line(host, 1e8) == Speed(1e-4, 1e-8, 5e-10)
    assert scale.on_line(host, 1e12) == host


def test_the_rate_of_the_line_counts_frames() -> None:
    there = scale.scene(network(result(None)), 2)
    speed = there.on(1e8).wires["int8"].speeds[Kind.ALL_TO_ALL]
    assert speed.byte == pytest.approx(8e-8 * FRAMED)
    assert there.on(None) == there


def test_predictions_are_held_against_what_was_measured() -> None:
    right = 0.010 + sends(3.6e6, 8e-9 * FRAMED)
    slow = result(1e9, **{"ours fp32": right / 1.1, "all-reduce alone": 0.04, "ours auto": 0.03})
    checked = list(
        scale.check(
            network(
                result(None, **dict.fromkeys(COUNTS, 0.012), **{"all-reduce alone": 0.004}), slow
            )
        )
    )
    assert len(checked) == 5 + 3
    (fp32,) = (
        each
        for each in checked
        if (each["rate_bits_per_s"], each["contender"]) == (1e9, "ours fp32")
    )
    assert fp32["error"] == pytest.approx(0.1, rel=0.2)
    assert {each["contender"] for each in checked} == {*COUNTS, "all-reduce alone"}


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scale.py", "--network", str(path), *arguments])
    return scale.main()


def test_it_writes_a_table_and_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there = scale.scene(network(result(None)), 2)
    measured = {name: there.step(wire, 2) for wire, name in scale.CONTENDERS.items()}
    measured |= {"all-reduce alone": there.all_reduce(2)}
    measured["ours auto"] = there.mixed("ours auto", ["float32", "int8", "int8"], 2)
    path, out = (tmp_path / name for name in ("network_wire.json", "out.json"))
    path.write_text(json.dumps(network(result(None, **measured))))
    assert run(monkeypatch, path, "--out", str(out)) == 0
    assert "met" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert {each["error"] for each in content["checked"]} == {0}
    assert "ours int8" in "\n".join(markdown(report_tables.scale(Result(content))))


def test_a_prediction_that_is_far_off_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "network_wire.json"
    measured = {**dict.fromkeys(COUNTS, 0.1), "all-reduce alone": 0.1}
    path.write_text(json.dumps(network(result(None, **measured))))
    assert run(monkeypatch, path) == 1
    assert "missed" in capsys.readouterr().out


def test_a_result_without_a_probe_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "network.json"
    for content in (network(result(1e9)), network({**result(None), "choice": {}})):
        path.write_text(json.dumps(content))
        assert run(monkeypatch, path) == 2
        assert "--by-wire" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path / "missing.json") == 2


def test_more_than_two_hosts_send_sums_where_two_exchange_directly() -> None:
    one = result(None)
    seconds = one["choice"]["figures"]["seconds"]
    for name in [name for name in seconds if name.startswith("all-gather")]:
        del seconds[name]
    wire = scale.scene(network(one), 2).wires["int8"]
    assert wire.is_direct
    assert scale.among(2, wire) == wire
    four = scale.among(4, wire)
    assert list(four.speeds) == [Kind.ALL_TO_ALL, Kind.ALL_GATHER]
    assert four.reduce == Kernel(0.0, pytest.approx(INT8))
    parts = passage(four, Load(1000), 4)
    assert [stage.kind for stage in parts.stages] == [Kind.ALL_TO_ALL, None, Kind.ALL_GATHER]
