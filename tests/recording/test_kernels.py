"""The kernels as the recorded device plays them have the bits of their twins too."""

from collections.abc import Iterator

import pytest
from against_twins import *  # noqa: F403
from against_twins import Place

from recording.device import recording

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.sampled(6, 1)]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    # What Triton itself imports late, at the first launch, is interpreted too.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with recording() as recorder:
        yield Place.of("cuda")
    assert not recorder.races, recorder.report()
