"""Does anything pile up, or drift, over ten thousand steps? `make soak` finds out.

Two ranks play scenarios of the differential test that are longer than there, some of them by far,
and the oracle judges each step. :mod:`soak.footprint` measures what the process holds.
"""
