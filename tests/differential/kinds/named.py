"""Named programs: each with copies and with views, large and small buckets, after a microbatch."""

from __future__ import annotations

from dataclasses import replace

from differential.actions.named import NamedStep
from differential.named import PROGRAMS
from differential.program import NetworkSpec, Program

# Small buckets hold a parameter or two; on three ranks, which need more time for each, two layers.
SMALL = {2: 1e-4, 3: 4e-4}
# Views, small buckets, a microbatch first.
VARIANTS = (
    (False, False, False),
    (True, True, True),
    (True, True, False),
    (False, False, True),
)


def draw(seed: int, world_size: int) -> Program:
    """All programs in turn, then all in the next variant."""
    variant, number = divmod(seed, len(PROGRAMS))
    name, named = [*PROGRAMS.items()][number]
    views, is_small, accumulates = VARIANTS[variant % len(VARIANTS)]
    options = named.options
    if views:
        options = replace(options, gradient_as_bucket_view=True)
    if is_small:
        options = replace(options, bucket_cap_mb=SMALL.get(world_size))
    # After the second step gradients stay.
    steps = (NamedStep(name, step, step != 2, accumulates) for step in range(3))
    return Program(*("named", seed, world_size, NetworkSpec(()), options, tuple(steps)), named=name)
