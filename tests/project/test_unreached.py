"""What the list of statements that no test executes names is in the package."""

from unreached import ALL, UNREACHED, functions


def test_each_entry_is_a_function_with_so_many_statements_and_has_a_reason() -> None:
    for name, entries in UNREACHED.items():
        for function, (number, reason) in entries.items():
            assert function in functions(name), f"{name} has no {function}"
            of_function = len(functions(name)[function])
            assert of_function >= (1 if number == ALL else number), f"{name}: {function}"
            assert len(reason) > 10
