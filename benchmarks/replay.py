"""Interleaved rounds for pytest-benchmark.

pytest-benchmark times each test wholly after the other, so that whatever changes on the machine
meanwhile, clocks or neighbours, looks like a difference between them; and it knows the host's clock
alone. The benchmarks here therefore time all rows of a group in shuffled rounds themselves, when
the first of its tests runs, and each test hands its row's times on: by a clock that is looked at
twice a round and shows what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_looks: Iterator[float] = iter(())


def clock() -> float:
    """The timer of these tests: ``@pytest.mark.benchmark(timer=replay.clock)``."""
    return next(_looks)


def replay(benchmark: Any, seconds: Sequence[float]) -> None:
    """Make ``seconds`` the rounds of pytest-benchmark's fixture ``benchmark``, in this order."""
    global _looks
    _looks = iter([look for elapsed in seconds for look in (0.0, elapsed)])
    benchmark.pedantic(lambda: None, rounds=len(seconds), iterations=1)
