"""WHAT CAN BE OBSERVED: checksums, stock's logging data, the debug log."""
