"""Which tests reach a line: also in the processes that a test is given, one after another."""

from pathlib import Path

import pytest
from measured import ROOT, functions, measure, owner_of
from tests_of import lines_of, reaching


@pytest.mark.parametrize(
    ("context", "test"),
    [
        ("", ""),
        ("tests/a.py::test_one[x (y)|z]", "tests/a.py::test_one[x (y)|z]"),
        ("tests/a.py::test_one (call)", "tests/a.py::test_one"),
        (
            "tests/a.py::test_one (setup)|tests/b.py::test_two[1|2] (call)",
            "tests/b.py::test_two[1|2]",
        ),
    ],
)
@pytest.mark.quick
def test_a_context_names_the_test_that_a_process_was_given(context: str, test: str) -> None:
    assert owner_of(context) == test


def test_of_a_definition_the_lines_are_its_body_and_of_a_statement_all_its_lines(
    tmp_path: Path,
) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "def f(\n    x,\n):\n    if x:\n        y = [\n            1,\n        ]\n    return x\n"
    )
    assert lines_of(path, 2) == range(4, 9)
    assert lines_of(path, 4) == range(4, 5)
    assert lines_of(path, 6) == range(5, 8)
    assert lines_of(path, 8) == range(8, 9)


@pytest.mark.long
def test_the_tests_of_a_line_are_those_that_reach_it_in_processes_too(tmp_path: Path) -> None:
    pytest.importorskip("coverage", reason="make tests-of installs it")
    file = "tests/reducer/test_world_of_one.py"
    measure(["-n", "0", "-q", file, "-m", "not long"], tmp_path)
    (line,) = (each.start for each in functions("ddp.py")["DistributedDataParallel.forward"][:1])
    found = reaching(ROOT / "tritonddp" / "ddp.py", line, tmp_path)
    assert found
    assert {each.partition("::")[0] for each in found} == {file}
