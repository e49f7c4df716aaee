"""Named programs: training steps of users, which must give the right gradients.

A named program is a function ``step(net, rank, step)`` that runs one training step up to the
gradients. It gets the wrapped model (or, for the oracle, an unwrapped one with the same methods),
draws its data from torch's generator, and uses nothing else that differs between ranks except
``rank``. Add a program to the module of its subject:

    @program(UNUSED, RIGHT, model=Branches)
    def last_branch_is_unused(net, rank, step):
        net(batch(), "abcde").sum().backward()

``test_named.py`` plays each in all variants, and ``README.md`` in this folder lists all programs
with their outcomes under stock DDP.
"""

from differential.named import (  # noqa: F401  each adds its programs to the table
    beyond_stock,
    changes,
    no_sync,
    plain,
    requests,
    several_backwards,
    unused,
    weights,
)
from differential.named.table import PROGRAMS, Named

__all__ = ["PROGRAMS", "Named"]
