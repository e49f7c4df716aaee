"""The kernels against their twins, in Triton's interpreter."""

import pytest
from against_twins import *  # noqa: F403
from against_twins import Place

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def place() -> Place:
    return Place.of("cpu")
