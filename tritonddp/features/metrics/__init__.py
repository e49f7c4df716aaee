"""How long the parts of a step take on each rank, and who is slow (``metrics=True``)."""
