"""Buffers are rank 0's at each forward before which stock broadcasts them, however written."""
