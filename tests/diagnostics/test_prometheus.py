"""Metrics in the text format of Prometheus: read back by a parser of its grammar."""

import importlib.util
import math
import re
from typing import Any

import pytest
from distributed import ranks
from torch import nn, ones

from tritonddp import DistributedDataParallel
from tritonddp.diagnostics.prometheus import prometheus_text

METRICS: dict[str, Any] = {
    "step": 12,
    "step_ms": 20.5,
    "input_ms": 3.0,
    "forward_ms": 5.0,
    "backward_ms": 10.0,
    "exposed_ms": 2.5,
    "contended_ms": 0.0,
    "skew_ms": 1.5,
    "sent_bytes": 4096,
    "slowest_rank": 3,
    "slowest_phase": "backward",
    "slowest_by": 0.25,
}
LABELS = {"job": 'a "b"\\n \n{},=', "rank": "0"}
NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
PLAIN = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
QUOTED = r'"((?:[^"\\\n]|\\["\\n])*)"'


def parse(text: str) -> dict[str, tuple[str, dict[str, str], float]]:
    """Of each name its kind, its labels and its value. Nothing but the grammar is accepted."""
    found = {}
    assert text.endswith("\n")
    lines = iter(text.split("\n")[:-1])
    for told, kind, sample in zip(lines, lines, lines, strict=True):
        (name,) = re.fullmatch(rf"# HELP ({NAME}) [^\\\n]+", told).groups()  # type: ignore[union-attr]
        (of,) = re.fullmatch(rf"# TYPE {name} (counter|gauge)", kind).groups()  # type: ignore[union-attr]
        match = re.fullmatch(rf"{name}(?:\{{(.+)\}})? ([-+.e\dNaIinf]+)", sample)
        assert match is not None, sample
        inside, value = match.groups()
        pattern = rf"([a-zA-Z_][a-zA-Z0-9_]*)={QUOTED}(?:,|$)"
        pairs = re.findall(pattern, inside or "")
        assert re.sub(pattern, "", inside or "") == ""
        labels = {k: re.sub(r"\\.", lambda m: PLAIN[m[0]], v) for k, v in pairs}
        assert name not in found
        found[name] = of, labels, float(value)
    return found


def test_what_is_written_is_read_back() -> None:
    found = parse(prometheus_text(METRICS, LABELS))
    assert all({**labels, **LABELS} == labels for _, labels, _ in found.values())
    parts = {name.removesuffix("_ms"): ms for name, ms in METRICS.items() if name.endswith("_ms")}
    assert len(parts) == 7
    assert {name: value for name, (_, _, value) in found.items()} == {
        **{f"tritonddp_{part}_seconds": ms / 1000 for part, ms in parts.items()},
        "tritonddp_steps_total": 12,
        "tritonddp_sent_bytes": 4096,
        "tritonddp_slowest_rank": 3,
        "tritonddp_slowest_phase": 1,
        "tritonddp_slowest_ratio": 0.25,
    }
    assert found["tritonddp_slowest_phase"][1]["phase"] == "backward"
    kinds = {kind for name, (kind, _, _) in found.items() if name.endswith("_total")}
    assert kinds == {"counter"}


def test_the_parser_of_prometheus_reads_the_same() -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        pytest.skip("needs prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    text = prometheus_text(METRICS, LABELS)
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    assert {s.name: (s.labels, s.value) for s in samples} == {
        name: (labels, value) for name, (_, labels, value) in parse(text).items()
    }


def test_what_is_not_known_is_left_out() -> None:
    assert prometheus_text({"step_ms": None, "slowest_phase": None, "other": 3}) == ""
    assert parse(prometheus_text({"skew_ms": 1.0}))["tritonddp_skew_seconds"] == (
        *("gauge", {}),
        0.001,
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e-300, 1e300])
def test_any_number(value: float) -> None:
    (found,) = parse(prometheus_text({"slowest_by": value})).values()
    assert found[2] == value or math.isnan(found[2] + value)


@pytest.mark.parametrize("name", ["", "1a", "a-b", "__a", "ä", "a\n", "phase", 3])
def test_labels_that_prometheus_does_not_allow(name: Any) -> None:
    with pytest.raises(ValueError, match="cannot be a label"):
        prometheus_text(METRICS, {name: "x"})


@ranks(2)
def test_all_that_metrics_tells_has_a_name() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 1), metrics=True)
    for _ in range(4):
        ddp(ones(1, 2)).sum().backward()
    known = {name: value for name, value in ddp.metrics().items() if value is not None}
    assert len(parse(prometheus_text(known))) == len(known)
    every = dict.fromkeys(ddp.metrics(), 1.0)
    assert len(parse(prometheus_text(every))) == len(every)
