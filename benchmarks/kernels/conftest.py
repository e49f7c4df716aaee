"""The option of the kernel benchmark."""

from __future__ import annotations

from typing import Any

from bandwidth import MAX_MB


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--max-mb",
        type=float,
        default=MAX_MB,
        help="largest bucket of the kernel benchmark, in MB of gradients (default: %(default)s)",
    )
