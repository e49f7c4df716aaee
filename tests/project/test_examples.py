"""examples/train.py: it learns, ranks agree, both wrappers end with the same bits."""

import re
import subprocess
from pathlib import Path

import launched
import pytest
from launched import ROOT

pytest.importorskip("sklearn", reason="needs the extra [examples]")
pytest.importorskip("tqdm", reason="needs the extra [examples]")

EXAMPLE = ROOT / "examples" / "train.py"


def run(script: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, list[str]]]:
    """Run a script; also the cells of its table by the label of their line."""
    done = launched.run(script, "--task", "digits", *words, env={"PYTHONPATH": str(ROOT)})
    rows = re.findall(r"^(\S.*?) {2,}(.+)$", done.stdout, re.MULTILINE)
    return done, {label: cells.split() for label, cells in rows}


@pytest.mark.long
def test_stock_and_tritonddp_learn_the_digits_with_the_same_bits() -> None:
    done, table = run(EXAMPLE, "--steps", "60", "--ddp", "both")
    assert done.returncode == 0, done.stderr
    assert table["bit-identical on all 2 ranks"] == ["yes", "yes"]
    assert "stock to tritonddp: 0 (bit-identical)" in done.stdout
    stock, ours = table["held-out loss, nats per digit"]
    assert stock == ours
    assert float(stock) < 0.3
    assert all(float(cell) > 93 for cell in table["held-out accuracy, %"])
    # The printed ratio is that of the printed times, with its interval.
    its, ours = map(float, table["a step, ms"])
    found = re.search(
        r"tritonddp: ([\d.]+) of stock's time \(95 % interval ([\d.]+) to ([\d.]+)\)", done.stdout
    )
    middle, low, high = map(float, found.groups())
    assert middle == pytest.approx(ours / its, rel=0.01)
    assert low <= middle <= high
    assert done.stdout.rstrip().endswith("this run cannot tell") == (low <= 1 <= high)
    assert done.stderr.count("step 60 of 60") == 1  # lines instead of a bar, only on rank 0


UNSYNCHRONIZED = f"""
import contextlib, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import torch, train

class Unsynchronized(torch.nn.Module):
    def __init__(self, module, **_):
        super().__init__()
        self.module = module
        self.no_sync = contextlib.nullcontext

    def forward(self, x):
        return self.module(x)

train.WRAPPERS["tritonddp"] = Unsynchronized
sys.exit(train.main())
"""


@pytest.mark.long
def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    script = tmp_path / "unsynchronized.py"
    script.write_text(UNSYNCHRONIZED)
    done, table = run(script, "--steps", "3")
    assert done.returncode != 0
    assert table["bit-identical on all 2 ranks"] == ["NO"]
    assert "ERROR: tritonddp: 0.weight differs between the ranks" in done.stderr
    assert re.search(r"exitcode *: 1 ", done.stderr)
