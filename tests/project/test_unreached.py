"""What the list of lines that no test executes names is in the package, and nowhere else."""

from __future__ import annotations

import pytest
from unreached import UNREACHED, compare, named


@pytest.mark.parametrize("name", UNREACHED)
def test_each_entry_is_one_statement_and_has_a_reason(name: str) -> None:
    for text, found in named()[name].items():
        assert len(found) == 1, f"{name}: {len(found)} statements begin with: {text}"
        assert len(UNREACHED[name][text]) > 10


def test_a_line_that_is_not_named_is_reported_and_so_is_an_entry_that_is_reached(capsys) -> None:
    name, entries = next(iter(named().items()))
    first = {name: [min(at) for (at,) in entries.values()]}
    others = {each: [min(at) for (at,) in spans.values()] for each, spans in named().items()}
    assert compare(others) == 0
    assert compare({**others, "__init__.py": [1]}) == 1
    assert "__init__.py: not executed" in capsys.readouterr().out
    assert compare({**others, name: first[name][1:]}) == 1
    assert "named, and executed" in capsys.readouterr().out
