"""The example does what it prints: it learns, ranks agree, both wrappers end with the same bits."""

import re
import subprocess
from pathlib import Path

import launched
import pytest
from launched import ROOT

pytest.importorskip("sklearn", reason="needs the extra [examples]")
pytest.importorskip("tqdm", reason="needs the extra [examples]")

EXAMPLE = ROOT / "examples" / "train.py"


def run(
    *arguments: str | Path, nproc: int | None = 2, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script with this checkout's tritonddp."""
    return launched.run(*arguments, nproc=nproc, env={"PYTHONPATH": str(ROOT), **(env or {})})


def row(output: str, label: str) -> list[str]:
    """The cells of the line of the final table that begins with ``label``."""
    match = re.search(rf"^{re.escape(label)} {{2,}}(.+)$", output, re.MULTILINE)
    assert match, f"no line {label!r} in:\n{output}"
    return match[1].split()


@pytest.mark.long
def test_digits_are_learnt_alike_with_stock_and_tritonddp() -> None:
    done = run(EXAMPLE, "--task", "digits", "--steps", "60", "--ddp", "both")
    assert done.returncode == 0, done.stderr
    assert row(done.stdout, "bit-identical on all 2 ranks") == ["yes", "yes"]
    assert "stock to tritonddp: 0 (bit-identical)" in done.stdout
    stock, ours = row(done.stdout, "held-out loss, nats per digit")
    assert stock == ours
    assert float(stock) < 0.3
    assert all(float(cell) > 93 for cell in row(done.stdout, "held-out accuracy, %"))
    # The printed ratio is that of the printed times, and says what it can tell.
    its, ours = map(float, row(done.stdout, "a step, ms"))
    found = re.search(
        r"tritonddp: ([\d.]+) of stock's time \(95 % interval ([\d.]+) to ([\d.]+)\)", done.stdout
    )
    middle, low, high = map(float, found.groups())
    assert middle == pytest.approx(ours / its, rel=0.01)
    assert low <= middle <= high
    assert done.stdout.rstrip().endswith("this run cannot tell") == (low <= 1 <= high)
    assert done.stderr.count("step 60 of 60") == 1  # lines instead of a bar, from rank 0 alone


@pytest.mark.long
def test_ranks_that_differ_are_found_and_named(tmp_path: Path) -> None:
    script = tmp_path / "unsynchronized.py"
    script.write_text(
        f"""
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
    )
    done = run(script, "--task", "digits", "--steps", "3")
    assert done.returncode != 0
    assert row(done.stdout, "bit-identical on all 2 ranks") == ["NO"]
    assert "ERROR: tritonddp: 0.weight differs between the ranks" in done.stderr
    assert re.search(r"exitcode *: 1 ", done.stderr)
