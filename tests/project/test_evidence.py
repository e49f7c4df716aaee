"""`make evidence`: scripts that fail with stock DDP and not with tritonddp."""

import ast
import re

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


def test_scripts_are_short_name_a_thread_and_are_on_the_page() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    for path in SCRIPTS:
        source = path.read_text()
        assert len(source.splitlines()) <= 60, path.name
        assert "tritonddp" not in ast.unparse(ast.parse(source)), path.name  # except in comments
        assert re.search(r"[\w.-]+/[\w.-]+#\d+[^(]* \(202[256]", source), path.name
        assert f"\n| [{path.stem}](" in page
