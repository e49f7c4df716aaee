"""What the list of statements that no test executes names is in the package."""

import pytest
from unreached import ALL, UNREACHED, compare, functions


@pytest.mark.parametrize("name", UNREACHED)
def test_each_entry_is_a_function_with_so_many_statements_and_has_a_reason(name: str) -> None:
    for function, (number, reason) in UNREACHED[name].items():
        assert function in functions(name), f"{name} has no {function}"
        of_function = len(functions(name)[function])
        assert of_function >= (1 if number == ALL else number), f"{name}: {function}"
        assert len(reason) > 10


def test_a_line_that_is_not_named_is_reported_and_so_is_an_entry_that_is_reached(capsys) -> None:
    missing = {
        name: [
            statement.start
            for function, (number, _) in entries.items()
            for statement in functions(name)[function][: None if number == ALL else number]
        ]
        for name, entries in UNREACHED.items()
    }
    name = next(iter(missing))
    assert compare(missing) == 0
    assert compare({**missing, "__init__.py": [functions("__init__.py")[""][0].start]}) == 1
    assert "__init__.py, : 1 not executed, 0 are named" in capsys.readouterr().out
    assert compare({**missing, name: missing[name][1:]}) == 1
    assert "named, and executed" in capsys.readouterr().out
