"""Which faults a run plays, and what its head says of that."""

from __future__ import annotations

from faults.table import FAULTS, SEED, chosen, seed


def pytest_configure() -> None:
    seed()  # before other processes are started, on which the day may be another one


def pytest_report_header() -> str:
    return (
        f"faults: {len(chosen())} of {len(FAULTS)}, {SEED}={seed()} (all of them: make test-faults)"
    )
