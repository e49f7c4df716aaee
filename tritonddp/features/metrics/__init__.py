"""``metrics=True``: how long the parts of a step take on each rank, and which rank is slow."""
