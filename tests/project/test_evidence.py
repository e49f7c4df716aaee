"""``make evidence``: scripts that fail with stock DDP and not with tritonddp."""

import launched
import pytest
from launched import ROOT

FOLDER = ROOT / "examples" / "failures"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "run")


@pytest.mark.long
@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS])
def test_a_script_fails_with_stock_and_not_with_tritonddp(name: str) -> None:
    done = launched.run(FOLDER / "run.py", name, "--limit", "150", nproc=None, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Right with stock: 0 of 1." in done.stdout
    assert f"\n| [{name}](" in (ROOT / "docs" / "evidence.md").read_text()
