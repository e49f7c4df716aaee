"""How many examples a test draws."""

import os

from hypothesis import HealthCheck, Phase, settings

# TRITONDDP_FUZZ=2000 draws as many in each test, others each time. CI draws a few, always the same.
_MANY = os.environ.get("TRITONDDP_FUZZ")


def examples(few: int) -> settings:
    """Of a test that draws so many in CI."""
    return settings(
        max_examples=int(_MANY or few),
        derandomize=_MANY is None,
        database=None,
        deadline=None,
        # To explain a failure hypothesis traces each line of torch, for minutes.
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=_MANY is not None,
    )
