"""A world of one for the host benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import cost
import pytest


@pytest.fixture(scope="session", autouse=True)
def world_of_one() -> Iterator[None]:
    with cost.session():
        yield
