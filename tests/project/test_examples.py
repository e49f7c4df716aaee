"""examples/train.py: it learns, ranks match, and both wrappers end with the same bits."""

import re

import launched
import pytest
from launched import ROOT

pytest.importorskip("sklearn", reason="needs the extra [examples]")
pytest.importorskip("tqdm", reason="needs the extra [examples]")


@pytest.mark.long
def test_stock_and_tritonddp_learn_the_digits_with_the_same_bits() -> None:
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
    # The printed ratio is the quotient of the printed times.
    its, ours = map(float, table["a step, ms"])
    ratio = re.search(r"tritonddp: ([\d.]+) of stock's time \(95 % interval ", done.stdout)[1]
    assert float(ratio) == pytest.approx(ours / its, rel=0.01)
