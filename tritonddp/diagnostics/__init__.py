"""WHAT CAN BE OBSERVED: checksums, stock's logging data, who is behind."""
