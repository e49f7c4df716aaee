"""The entries of ``unreached.py``, which lists statements that no test executes, are valid."""

from unreached import ALL, UNREACHED, functions


def test_each_entry_names_a_function_with_as_many_statements() -> None:
    for name, entries in UNREACHED.items():
        for function, (number, _) in entries.items():
            assert function in functions(name), f"{name} has no {function}"
            of_function = len(functions(name)[function])
            assert of_function >= (1 if number == ALL else number), f"{name}: {function}"
