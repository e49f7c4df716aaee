"""The kernels have the bits of their twins on the recorded device too."""

from collections.abc import Iterator

import pytest
from against_twins import *  # noqa: F403
from against_twins import Place

from recording.device import recording

# The interpreter uses numpy, which warns about infinities and NaNs.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.sampled(6, 1)]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    # What Triton itself imports late, at the first launch, is interpreted too.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with recording() as recorder:
        yield Place("cuda")
    assert not recorder.races, recorder.report()
