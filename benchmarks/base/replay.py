"""Interleaved rounds for pytest-benchmark: the test of each test module of a suite.

pytest-benchmark times each test wholly after the other, so that whatever changes on the machine
meanwhile, clocks or neighbours, looks like a difference between them; and it knows the host's clock
alone. The suites therefore time all rows of a group in shuffled rounds themselves, when the first
of its cases is asked for, and each test hands its row's times on: by a clock that is looked at
twice a round and shows what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from benchmarks.base.suite import Case, groups_from

_looks: Iterator[float] = iter(())
measured: dict[ModuleType, list[dict[str, Any]]] = {}  # by suite, what its rows say


def _clock() -> float:
    return next(_looks)


@pytest.mark.benchmark(timer=_clock)
def test_case(benchmark: Any, case: Case, request: Any) -> None:
    """Fill pytest-benchmark's row of a case; the module that has it names its ``suite``."""
    global _looks
    suite = request.module.suite
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [spec.params["case"] for spec in specs if spec and "case" in spec.params]
    row = suite.row(case, request.config.option.rounds, groups_from(chosen, case))
    benchmark.group = case.group
    benchmark.extra_info.update(row.info)
    _looks = iter([look for elapsed in row.seconds for look in (0.0, elapsed)])
    benchmark.pedantic(lambda: None, rounds=len(row.seconds), iterations=1)
    measured.setdefault(suite, []).append(row.info)
