"""WHAT CAN BE OBSERVED: timelines, checksums, stock's logging data, the debug log."""
