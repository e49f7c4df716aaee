"""growth.py: what it says of result files, and that it measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ROOT

from benchmarks.base.results import Result
from benchmarks.report.table import Table
from benchmarks.report.tables import growth


def row(name: str, grown: int, **found: float) -> dict[str, object]:
    return {"parameters": 100, "ranks": 2, "name": name, "grown": grown, **found}


def test_what_is_shown_is_above_the_unwrapped_model() -> None:
    times = {"wrapping_seconds": 0.5, "above_seconds": 0.003}
    rows = [
        row("unwrapped", 10_000_000, wrapping_seconds=0.0, step_seconds=0.010),
        row("ours", 12_500_000, **times, step_seconds=0.012),
    ]
    counted = {"collectives": 3, "wire_bytes": 4_000_000, "sent_bytes": 2_000_000}
    rows += [
        {**row("unwrapped", 10_000_000), "ranks": 4},
        {**row("ours", 11_000_000, **counted), "ranks": 4},
    ]
    of_parameters, of_ranks = (
        block for block in growth(Result({"rows": rows})) if isinstance(block, Table)
    )
    assert of_parameters.rows == [("100", "ours", "500", "12.0", "3.00", "2.5")]
    assert of_ranks.rows == [("4", "ours", "3", "4.000", "2.000", "1.0")]


@pytest.mark.long
def test_a_small_run_counts_the_same_bytes_as_stock(tmp_path: Path) -> None:
    out = tmp_path / "growth.json"
    script = ROOT / "benchmarks" / "growth" / "growth.py"
    command = [sys.executable, str(script), "--parameters", "10", "--ranks", "2", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    timed, counted = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert [row["name"] for row in timed] == [row["name"] for row in counted]
    assert all(len(row["raw_step_seconds"]) == 2 for row in timed)
    sent = {row["name"]: row["wire_bytes"] for row in counted}
    grown = {row["name"]: row["grown"] for row in counted}
    # Parameters and gradients; and what is packed, in a bucket or in memory of the host.
    model = 2 * 4 * 12 * (512 * 512 + 512)
    for name, least in (("unwrapped", model), ("stock", 1.5 * model), ("ours", 1.5 * model)):
        assert 0.95 * least < grown[name] < 1.2 * least, grown
    gradients = 4 * 12 * (512 * 512 + 512)
    assert sent["unwrapped"] == 0
    assert sent["stock"] == gradients
    assert gradients < sent["ours"] == sent["ours, process group"] < 1.01 * gradients
