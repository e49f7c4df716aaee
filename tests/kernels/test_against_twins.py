"""The kernels against their twins, in Triton's interpreter."""

import pytest
from against_twins import *  # noqa: F403
from against_twins import Place

# The interpreter uses numpy, which warns about infinities and NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def place() -> Place:
    return Place()
