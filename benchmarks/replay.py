"""Interleaved rounds for pytest-benchmark.

pytest-benchmark times each test wholly after the other, so that whatever changes on the machine
meanwhile, clocks or neighbours, looks like a difference between them; and it knows the host's clock
alone. The suites therefore time all rows of a group in shuffled rounds themselves, when the first
of its cases is asked for, and each test hands its row's times on: by a clock that is looked at
twice a round and shows what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from rows import Case, groups_from

_looks: Iterator[float] = iter(())


def clock() -> float:
    """The timer of these tests: ``@pytest.mark.benchmark(timer=replay.clock)``."""
    return next(_looks)


def replay(benchmark: Any, seconds: Sequence[float]) -> None:
    """Make ``seconds`` the rounds of pytest-benchmark's fixture ``benchmark``, in this order."""
    global _looks
    _looks = iter([look for elapsed in seconds for look in (0.0, elapsed)])
    benchmark.pedantic(lambda: None, rounds=len(seconds), iterations=1)


def parametrize(metafunc: Any, cases: Iterable[Case]) -> None:
    """A test for each case of a suite."""
    metafunc.parametrize("case", [pytest.param(case, id=str(case)) for case in cases])


def measure(benchmark: Any, suite: Any, case: Case, request: Any) -> None:
    """Fill pytest-benchmark's row of a case."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [spec.params["case"] for spec in specs if spec and "case" in spec.params]
    row = suite.row(case, request.config.option.rounds, groups_from(chosen, case))
    benchmark.group = case.group
    benchmark.extra_info.update(row.info)
    replay(benchmark, row.seconds)
    _measured.setdefault(suite, []).append(row.info)


# By suite, what its rows say.
_measured: dict[Any, list[dict[str, Any]]] = {}


def tables() -> Iterator[str]:
    """Of all suites that have run."""
    for suite, infos in _measured.items():
        yield from suite.tables(infos)
