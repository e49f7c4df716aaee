"""The timeline is drawn: every label is readable, and the benchmark writes what it says."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest
from benchmarked import check_labels
from launched import ROOT, run

from tritonddp.diagnostics.timeline import (
    Backward,
    BucketPass,
    Gradient,
    Interval,
)


def backward(buckets: int, compute: float, sent: float, reduced: bool = True) -> Backward:
    """One in which gradients come evenly and the wire takes one bucket after the other (in ms)."""
    passes, gradients = [], []
    done, finished = 0.0, compute
    for index in range(buckets):
        ready = compute * (index + 1) / buckets * 0.99
        gradients += [Gradient(f"{index}.{n}", index, 1 + ready * 1e-3) for n in range(3)]
        done = max(done, ready) + sent
        finished = max(finished, done)
        times = [1 + time * 1e-3 for time in (ready, done, finished, finished + 0.01)]
        flattens = (Interval(times[0] - 1e-5, times[0]),)
        unflatten = Interval(times[2], times[3])
        nbytes = 17 ** (index % 7)
        passes.append(BucketPass(index, nbytes, (), flattens, times[0], times[1], unflatten))
        finished += 0.01
    ended = finished if reduced else compute
    return Backward(
        began=1.0,
        compute_ended=1 + compute * 1e-3,
        ended=1 + ended * 1e-3,
        reduced=reduced,
        first=False,
        broken=False,
        gradients=tuple(gradients),
        buckets=tuple(passes) if reduced else (),
    )


CASES = {
    "one bucket": backward(1, 10.0, 2.0),
    "one bucket, hidden": backward(1, 1000.0, 0.01),
    "some": backward(6, 50.0, 4.0),
    "many, fast": backward(40, 50.0, 0.2),
    "many, slow": backward(30, 50.0, 30.0),
    "very many, slow": backward(200, 50.0, 30.0),
    "nothing but communication": backward(3, 0.001, 500.0),
    "local": backward(5, 3.0, 1.0, reduced=False),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_label_overlaps_another_or_leaves_the_picture(case: Backward, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [bench]")

    from benchmarks.timeline.plot import Picture, draw

    figure = Picture(case, "transformer", "rank 0 of 2 over gloo on cpu").figure
    labels = check_labels(figure)
    assert {"compute", "gradients ready", "time since the backward began, ms"} <= set(labels)
    assert ("communication" in labels) == case.reduced
    draw(case, tmp_path / "timeline.png", "transformer", "rank 0 of 2 over gloo on cpu")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.report.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        importlib.import_module("benchmarks.report.drawing")


@pytest.mark.long
def test_the_benchmark_writes_picture_trace_and_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [bench]")
    options = ["--backend", "gloo", "--models", "mlp", "--steps", "3", "--out", str(tmp_path)]
    done = run(ROOT / "benchmarks" / "timeline" / "timeline.py", *options, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "timeline-mlp.png").read_bytes().startswith(b"\x89PNG")
    trace = gzip.decompress((tmp_path / "timeline-mlp.trace.json.gz").read_bytes())
    assert sum(each.get("cat") == "backward" for each in json.loads(trace)["traceEvents"]) == 3
    content = json.loads((tmp_path / "timeline.json").read_text())
    assert content["benchmark"] == "timeline"
    result = content["models"]["mlp"]
    assert [len(result[f"{what}_seconds"]) for what in ("exposed", "compute", "traced")] == [3] * 3
    exposed = result["median"]["ended"] - result["median"]["compute_ended"]
    assert exposed in result["exposed_seconds"]
