"""The table of cases: what people do with a wrapped model, and what must give the right gradients.

A case is a function ``step(net, rank, step)`` that runs one training step up to the gradients. It
gets the wrapped model (or, for the oracle, an unwrapped one with the same methods), draws its data
from torch's generator, and must use nothing else that differs between ranks but ``rank``. To add
one, write it into the module of its subject:

    @case(UNUSED, RIGHT, model=Branches)
    def last_branch_is_unused(net, rank, step):
        net(batch(), "abcde").sum().backward()

``reducer/test_nothing_to_know.py`` runs each in all variants against the oracle, and
``README.md`` beside this names each.
"""

from cases import (  # noqa: F401  each puts its cases into the table
    changes,
    checkpoints,
    no_sync,
    plain,
    requests,
    several_backwards,
    unused,
    weights,
)
from cases.table import CASES, Case

__all__ = ["CASES", "Case"]
