"""Rank 1 of four waits in a callback from step 3 on, where large buckets travel in shares.

Stock: works, since its buckets have been launched by then.
"""

from hostile.order import waits_in_a_callback

RANKS = 4
EXPECTED = waits_in_a_callback.EXPECTED


def program(DDP, record):
    waits_in_a_callback.program(DDP, record, first=3)
