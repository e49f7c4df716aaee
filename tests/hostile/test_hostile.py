"""Programs that know nothing of this package cannot tell it from stock DDP."""

from itertools import islice

import pytest

from hostile.beside import PROGRAMS, differences

# Played by `make test`.
QUICK = {"collectives.a_collective_before_the_first_gradient", "others.scripted_modules"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.quick] if name in QUICK else [])
        for name in sorted(PROGRAMS)
    ],
)
def test_a_program_sees_what_it_sees_under_stock(name: str) -> None:
    found = [each[:2000] for each in islice(differences(name), 5)]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_the_quick_programs_are_there() -> None:
    assert set(PROGRAMS) >= QUICK
