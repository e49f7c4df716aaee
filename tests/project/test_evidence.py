"""`make evidence`: a failure is one with stock DDP and none with tritonddp; a miss is printed."""

import ast
import importlib.util
import re
import sys
from types import ModuleType

import pytest
from launched import ROOT

FOLDER = ROOT / "examples" / "failures"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "run")


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_of_failures", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS])
def test_a_failure_is_one_with_stock_and_none_with_tritonddp(
    runner: ModuleType, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = runner.main([name, "--limit", "150"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "Right with stock: 0 of 1." in printed


def test_scripts_are_short_know_nothing_of_tritonddp_and_name_a_thread() -> None:
    for path in SCRIPTS:
        source = path.read_text()
        assert len(source.splitlines()) <= 60, path.name
        assert "tritonddp" not in ast.unparse(ast.parse(source)), path.name  # but in comments
        assert re.search(r"[\w.-]+/[\w.-]+#\d+[^(]* \(202[256]", source), path.name


def test_the_page_has_every_script() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert not [path.stem for path in SCRIPTS if f"\n| [{path.stem}](" not in page]
