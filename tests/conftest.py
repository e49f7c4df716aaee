"""What the head of each run says."""

from __future__ import annotations

from faults.table import FAULTS, SEED, chosen, seed


def pytest_report_header() -> str:
    return (
        f"faults: {len(chosen())} of {len(FAULTS)}, {SEED}={seed()} (all of them: make test-faults)"
    )
