"""Does anything pile up, or drift, over ten thousand steps? `make soak` finds out.

What each step does is drawn from a seed (:mod:`soak.plan`). Two ranks train by it
(:mod:`soak.training`), each beside one process that plays both without communication
(:mod:`soak.oracle`), and :mod:`soak.footprint` measures what the process holds.
"""
