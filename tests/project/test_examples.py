"""The example scripts learn, and show what their pages promise."""

import re

import launched
import pytest
from launched import ROOT

FAILURES = ROOT / "examples" / "failures"
SCRIPTS = sorted(path.stem for path in FAILURES.glob("*.py") if path.stem != "run")


@pytest.mark.long
def test_stock_and_tritonddp_learn_the_digits_with_the_same_bits() -> None:
    for needed in ("sklearn", "tqdm"):
        pytest.importorskip(needed, reason="needs the extra [examples]")
    words = ("--task", "digits", "--steps", "60", "--ddp", "both")
    script = ROOT / "examples" / "train.py"
    done = launched.run(script, *words, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\S.*?) {2,}(.+)$", done.stdout, re.MULTILINE)
    table = {label: cells.split() for label, cells in rows}
    assert table["bit-identical on all 2 ranks"] == ["yes", "yes"]
    assert "stock to tritonddp: 0 (bit-identical)" in done.stdout
    stock, ours = table["held-out loss, nats per digit"]
    assert stock == ours
    assert float(stock) < 0.3
    assert all(float(cell) > 93 for cell in table["held-out accuracy, %"])


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_fails_with_stock_and_not_with_tritonddp(name: str) -> None:
    """``make evidence``"""
    done = launched.run(FAILURES / "run.py", name, "--limit", "150", nproc=None, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Right with stock: 0 of 1." in done.stdout
    assert f"\n| [{name}](" in (ROOT / "docs" / "evidence.md").read_text()
