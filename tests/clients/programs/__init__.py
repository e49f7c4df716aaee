"""Programs as users of torch's class write them, with nothing changed but the class.

A program is a function that gets the class, or ``tritonddp.replicate``, trains something small on
every rank of the default group, and returns what it ends with. To add one, write it into the module
of its subject:

    @program
    def digits_with_a_closure(DDP):
        model = DDP(...)
        ...
        return state(model=bare(model))

``test_programs.py`` runs each with torch's class, with ours and in place, and compares the bits.
"""

from programs import (  # noqa: F401  each puts its programs into the table
    adversarial,
    averaging,
    finetuning,
    images,
    language_models,
    reinforcement,
    representations,
    sharding,
)
from programs.table import PROGRAMS, Program, Results, bare, state

__all__ = ["PROGRAMS", "Program", "Results", "bare", "state"]
